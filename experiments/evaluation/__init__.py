"""Benchmarks: their data, questions and marks; the model under test; the sandbox for the code that it writes."""

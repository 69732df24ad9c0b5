"""Prompts: sources, checks, order."""

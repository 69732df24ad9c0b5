"""The model under test: what the config means by it, and asking it, wherever it runs."""

"""Empty on purpose: import the modules."""

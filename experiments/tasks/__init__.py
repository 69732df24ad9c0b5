"""Environments with rewards; none yet. A task of the RLDS line gets a file of its own here."""

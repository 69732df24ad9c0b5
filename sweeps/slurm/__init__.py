"""Runs as jobs of a Slurm cluster: what to submit, submitting it once, what became of it."""

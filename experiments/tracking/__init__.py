"""What happened in a run: the spool (the truth), the tables made from it, and MLflow (a view of it)."""

"""What runs: methods, models, backends, tasks, tracking and the loop that joins them."""

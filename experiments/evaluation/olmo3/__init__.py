"""The protocol olmo3-adapt: one file per task."""

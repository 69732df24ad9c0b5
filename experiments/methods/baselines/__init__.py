"""The baselines of RACE Table 4, one file each; what they share stands in `common.py`."""

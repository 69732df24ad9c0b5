"""The rubric suite (RACE Table 5): answers are rated one by one; the ratings are compared with known preferences."""

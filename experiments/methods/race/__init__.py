"""RACE, Reward-Adaptive Co-Evolution of policy and rubric: one file per block of equations.

Files: `routing` (Eqs 5-9, 18), `pool` (10-11), `phase` (12-14, Algorithm 1), `rubric_reward` (15-16),
`controllers` (19-22). Advantages and loss (3-4) are in `methods/grpo.py`. All of these need numpy only.
"""

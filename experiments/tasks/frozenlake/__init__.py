"""FrozenLake (RLDS App. C.1 and D.1): boards, text environment, task, taxonomy, scripted grader and reflector."""

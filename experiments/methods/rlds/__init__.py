"""RLDS: reflect-retry rollouts trained with subtask-decomposed advantages (SDAE); the pure maths needs numpy only."""

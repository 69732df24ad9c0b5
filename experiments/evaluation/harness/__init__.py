"""Protocol `lm-eval`: the stock tasks of EleutherAI's lm-evaluation-harness 0.4.13, asked through racelab's own models.

Prompts, filters, metrics and few-shot counts are the harness's; only the way to the model, the reading of the data and
the running of code are ours, so that an evaluation streams, goes on where it stopped, and runs code in the sandbox
alone. See `stock.py` for the choice of variants and `examiner.py` for what a chat model is sent.
"""

"""HotpotQA: questions of two hops, answered with one search tool (RLDS App. C.2 and D.2).

`questions.jsonl` and `corpus.jsonl` are ours (Apache-2.0): people, places and works that do not exist, so that no model
can answer from memory. They show that every part works; they are no benchmark.
"""

"""MBPP+ with the real sandbox: a right answer, wrong ones, and what a test field of EvalPlus needs."""

from __future__ import annotations

import pytest

from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.mbpp_plus import MbppPlus
from racelab.experiments.evaluation.sandbox import Limits, run_code
from racelab.experiments.evaluation.types import Answer

# As the test fields of MBPP+ are made: numpy, inputs, results, and a loop over them.
TEST = """
import numpy as np

def same(out, wanted, tolerance):
    if isinstance(wanted, float):
        assert np.allclose(out, wanted, rtol=1e-07, atol=tolerance)
    else:
        assert out == wanted, f"out: {out}, wanted: {wanted}"

inputs = [[[3, 4]], [[5, 12]]]
results = [5.0, 13.0]
for given, wanted in zip(inputs, results):
    same(length(*given), wanted, 0)
"""
RECORD = {
    "task_id": 1,
    "prompt": "Write a function to find the length of a vector.",
    "code": "import math\ndef length(v):\n    return math.hypot(*v)",
    "test": TEST,
}
ANSWERS = {
    # `math` comes with the signature
    "Here is the completed function:\n\n```python\ndef length(v):\n    return math.dist(v, [0, 0])\n```": 1.0,
    "Here is the completed function:\n```python\n    return math.hypot(*v)\n```": 1.0,
    "<think>```python\ndef length(v): return 0.0\n```</think>```\ndef length(v):\n    return max(v)\n```": 0.0,
    "```python\ndef length(v):\n    raise SystemExit(0)\n```": 0.0,
    "```python\ndef length(v) return 1\n```": 0.0,
    "```python\ndef length(v):\n    while True: pass\n```": 0.0,
}


@pytest.mark.slow
def test_programs_run_confined() -> None:
    benchmark = MbppPlus(TaskSettings(), lambda text: run_code(text, Limits(timeout_s=8.0)))
    (example,) = benchmark.read([("f.jsonl:1", RECORD)])
    found = benchmark.mark(example, [Answer(text) for text in ANSWERS])
    assert [row["score"] for row in found.answers] == list(ANSWERS.values()), found.answers
    (mark,) = found.marks
    assert (mark.details["n"], mark.details["c"]) == (6, 2)
    assert mark.details["pass_at_5"] == 1.0  # four wrong ones are fewer than five
    assert "AssertionError" in found.answers[2]["error"] or "numpy" in found.answers[2]["error"]
    assert found.answers[5]["error"].startswith("timeout")

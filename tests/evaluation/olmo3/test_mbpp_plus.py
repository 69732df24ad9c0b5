"""MBPP+: prompt, extraction, program, pass@k. What runs programs is a stand-in that runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.mbpp_plus import MbppPlus, extract, pass_at, program
from racelab.experiments.evaluation.types import Answer, Benchmark, Example

HUB: dict[str, Any] = {
    "task_id": 2,
    "prompt": "Write a function to find the shared elements from the given two lists.",
    "code": "import math\ndef similar(a, b):\n  return tuple(set(a) & set(b))",
    "test": "assert set(similar((3, 4), (4, 5))) == {4}",
}
MULTIPL_E: dict[str, Any] = {
    "name": "mbpp_234_volume_cube",
    "prompt": 'def volume_cube(l: int) -> int:\n    """\n\tWrite a function to find the volume of a cube.\n\t"""\n',
    "entry_point": "volume_cube",
    "test": "def check(candidate):\n    assert candidate(3) == 27\n\ncheck(volume_cube)\n",
}
SENTENCE = "Here is the completed function:"


@dataclass(frozen=True)
class Ran:
    """As the sandbox answers."""

    passed: bool
    outcome: str = "passed"
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = 0
    seconds: float = 0.0


class Runner:
    """Remembers the programs; one passes if `right` stands in it."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def __call__(self, text: str) -> Any:
        self.programs.append(text)
        if "right" in text:
            return Ran(True)
        return Ran(False, "failed", stderr="Traceback\n  File\nAssertionError: no\n", exit_code=1)


def read(record: dict[str, Any]) -> Example:
    (example,) = MbppPlus(TaskSettings(), Runner()).read([("f.jsonl:7", record)])
    return example


def block(code: str) -> str:
    return f"First.\n\n{SENTENCE}\n\n```python\n{code}\n```\n"


def test_it_is_a_benchmark() -> None:
    benchmark = MbppPlus(TaskSettings(), Runner())
    assert isinstance(benchmark, Benchmark)
    assert [(s.name, s.split) for s in benchmark.sources] == [("evalplus/mbppplus", "test")]


def test_the_prompt_shows_task_and_signature_but_no_test_and_no_solution() -> None:
    benchmark = MbppPlus(TaskSettings(), Runner())
    ask = benchmark.ask(read(HUB))
    assert ask.user == (
        f"{HUB['prompt']}import math\ndef similar(a, b):\n\nProvide CONCISE reasoning on how to arrive at the answer, "
        "and make sure to finish the response with the following:\n\nHere is the completed function:\n\n"
        "```python\n(CODE)\n```\nwhere (CODE) is the code for the complete function."
    )
    assert benchmark.ask(read({**HUB, "prompt": " Add.\n"})).user.startswith(" Add.\nimport math\n")
    assert (ask.n, ask.max_tokens, ask.temperature, ask.top_p) == (10, 999_999, 0.6, 0.95)
    assert MbppPlus(TaskSettings(max_tokens=64), Runner()).ask(read(HUB)).max_tokens == 64


def test_multipl_e_records_are_read() -> None:
    example = read(MULTIPL_E)
    assert example.example_id == "mbpp_234_volume_cube"
    assert MULTIPL_E["prompt"].strip() in MbppPlus(TaskSettings(), Runner()).ask(example).user
    text = program(example.fields, "def volume_cube(l):\n    return l**3\n")
    exec(compile(text, "program", "exec"), {})  # our own three lines, not a model's


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block("x = 1"), "x = 1"),
        (f"```python\na\n```\n{SENTENCE}\n```\nb\n```\nUsed so:\n```python\nc\n```", "b"),
        (block("x = 1") + block("x = 2"), "x = 2"),
        ("```python\na\n```\nor\n```\n\n\nb  \n\n```", "b"),
        ("```py\na\n```", "py\na"),  # only `python` is taken off
        ("```x = 1```", "x = 1"),
        (f"{SENTENCE}\nno block, but before: ```python\na\n```", "a"),
        (f"{SENTENCE} \n```python\na\n```\n```\nb\n```", "b"),  # a blank: no block of the sentence
        (block("    return 1"), "    return 1"),
        (f"```\na\n```\n{SENTENCE}\n```python\n```", ""),  # an empty one; the last of all is that too
        (f"{SENTENCE}\n```\n```\n```\nb\n```", "b"),
        (f"{SENTENCE}\n```python\ncut", ""),
        ("def f(): pass", ""),
        ("", ""),
    ],
)
def test_extraction(text: str, code: str) -> None:
    assert extract(text) == code


def test_a_program_is_the_signature_the_answer_and_the_tests() -> None:
    fields = read(HUB).fields
    text = program(fields, "def similar(a, b):\n    return {4}\n")
    assert text.startswith('__name__ = "builtins"\nimport math\ndef similar(a, b):\n    """')
    assert text.endswith("return {4}\n\n" + HUB["test"])
    body = program(fields, "    return set(a) & set(b)\n")  # a body alone is the body of the signature
    exec(compile(body, "program", "exec"), {})


def test_what_an_answer_does_as_the_main_module_is_not_run() -> None:
    code = "def similar(a, b):\n    return {4}\nif __name__ == '__main__':\n    raise SystemExit"
    exec(compile(program(read(HUB).fields, code), "program", "exec"), {"__name__": "__main__"})


def test_a_signature_cut_at_the_colon_of_an_annotation_fails_every_answer() -> None:
    fields = read({**HUB, "code": "def f(a: int) -> int:\n    return a"}).fields
    with pytest.raises(SyntaxError):
        ast.parse(program(fields, "def f(a):\n    return a\n"))


@pytest.mark.parametrize(
    "text", ["```\n" + " \n" * 200_000, "```" * 200_000, f"{SENTENCE}\n" * 20_000 + "```", "\n" * 400_000]
)
def test_a_looping_answer_takes_no_longer_than_it_is_long(text: str) -> None:
    assert extract(text) == ""


def test_marks_and_rows() -> None:
    """c = 3 of 10: pass@1 = 3/10; pass@5 = 1 − C(7,5)/C(10,5) = 1 − 21/252 = 11/12; pass@10 = 1."""
    runner = Runner()
    example = read(HUB)
    texts = [
        *[block("right")] * 3,
        *[block("wrong")] * 5,
        "no block",
        "<think>" + block("right") + "</think> Never.",
    ]
    found = MbppPlus(TaskSettings(), runner).mark(example, [Answer(t, n_tokens=5) for t in texts])
    (mark,) = found.marks
    assert (mark.label, mark.score, mark.status) == ("mbpp_plus", 0.3, "scored")
    assert mark.details == {
        "pass_at_1": pytest.approx(3 / 10),
        "pass_at_5": pytest.approx(11 / 12),
        "pass_at_10": 1.0,
        "n": 10,
        "c": 3,
    }
    assert [row["score"] for row in found.answers] == [1.0] * 3 + [0.0] * 7
    assert [row["idx"] for row in found.answers] == list(range(10))
    assert found.answers[3]["error"] == "failed: AssertionError: no"
    assert (found.answers[0]["error"], found.answers[0]["extracted"]) == ("", "right")
    assert [found.answers[i]["extracted"] for i in (8, 9)] == [None, None]
    assert len(runner.programs) == 8  # what holds no block is not run


def test_no_block_at_all_is_unparsed() -> None:
    (mark,) = MbppPlus(TaskSettings(), Runner()).mark(read(HUB), [Answer("none")] * 10).marks
    assert (mark.score, mark.status, mark.details["c"]) == (0.0, "unparsed", 0)


def test_thinking_may_be_kept() -> None:
    text = "<think>" + block("right") + "</think> Never."
    benchmark = MbppPlus(TaskSettings(thinking="keep"), Runner())
    assert benchmark.mark(read(HUB), [Answer(text)]).marks[0].score == 1.0


@pytest.mark.parametrize(
    ("k", "n", "c", "wanted"),
    [
        (1, 10, 0, 0.0),
        (1, 10, 4, 0.4),
        (5, 10, 1, 0.5),  # 1 − C(9,5)/C(10,5) = 1 − 126/252
        (5, 10, 6, 1.0),  # four wrong ones are fewer than five
        (10, 10, 1, 1.0),
        (2, 4, 1, 0.5),  # 1 − 3/6
        (5, 4, 4, None),
    ],
)
def test_pass_at_k(k: int, n: int, c: int, wanted: float | None) -> None:
    assert pass_at(k, n, c) == (None if wanted is None else pytest.approx(wanted))


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    """Against counting: of all 3-subsets of 6 answers, 2 of them right."""
    from itertools import combinations

    draws = list(combinations([1, 1, 0, 0, 0, 0], 3))
    assert pass_at(3, 6, 2) == pytest.approx(sum(any(d) for d in draws) / len(draws))


@pytest.mark.parametrize(
    ("change", "says_so"),
    [
        ({"code": "x = 1"}, "field 'code' has no colon"),
        ({"code": None}, "field 'code' has type"),
        ({"test": ""}, "field 'test' is blank"),
        ({"prompt": 3}, "field 'prompt' has type int"),
    ],
)
def test_a_bad_record_is_named(change: dict[str, Any], says_so: str) -> None:
    with pytest.raises(DataError, match=r"^f\.jsonl:7: ") as caught:
        read({**HUB, **change})
    assert says_so in str(caught.value)


def test_a_record_of_neither_layout_is_named() -> None:
    with pytest.raises(DataError, match=r"'code' \(MBPP\+\) or 'entry_point' \(MultiPL-E\) is missing"):
        read({"prompt": "p", "test": "t"})


@given(st.text(alphabet="`\nab p:" + SENTENCE, max_size=60))
def test_extraction_never_raises_and_takes_what_is_there(text: str) -> None:
    assert extract(text) in text


def test_an_error_of_the_sandbox_is_not_a_wrong_answer() -> None:
    class Broken(Exception):
        pass

    def broken(_: str) -> Any:
        raise Broken

    runner: Callable[[str], Any] = broken
    with pytest.raises(Broken):
        MbppPlus(TaskSettings(), runner).mark(read(HUB), [Answer(block("right"))])

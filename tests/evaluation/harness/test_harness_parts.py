"""The parts of protocol `lm-eval` that need no lm-eval: choice of tasks, records, the sandboxed metric, marking."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from racelab.experiments.errors import ConfigError, DataError, RacelabError
from racelab.experiments.evaluation.harness.code_metric import SandboxedCodeEval, program, sandboxed
from racelab.experiments.evaluation.harness.examiner import LmEvalExaminer, ask_of
from racelab.experiments.evaluation.harness.loading import Item, StockBenchmark
from racelab.experiments.evaluation.harness.records import rows_of
from racelab.experiments.evaluation.harness.stock import STOCK, stock_tasks
from racelab.experiments.evaluation.types import Answer, Ask, Example


def test_benchmarks_that_lm_eval_lacks_are_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError) as error:
        stock_tasks(["gsm8k", "popqa", "zebralogic"])
    assert "no task for popqa, zebralogic; it has gsm8k, mbpp_plus, bbh, mmlu, gpqa, agieval, ifeval" in str(
        error.value
    )
    assert "eval.protocol=olmo3-adapt" in str(error.value)


def test_log_probs_are_refused_of_a_server_before_anything_is_loaded() -> None:
    assert [task.task for task in stock_tasks(["agieval"])] == ["agieval_en"]
    with pytest.raises(ConfigError, match="agieval by log-probs, which a server does not"):
        stock_tasks(["gsm8k", "agieval"], likelihoods=False)
    assert len(stock_tasks([n for n in STOCK if n != "agieval"], likelihoods=False)) == 6


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("gsm8k", {"question": "q"}, "f:1: field 'answer' is missing"),
        ("gsm8k", {"question": "q", "answer": 3}, "f:1: field 'answer' has type int"),
        ("bbh", {"task": "chess", "input": "i", "target": "t"}, "f:1: task 'chess' is none of bbh_cot_zeroshot's: a"),
        ("mmlu", {"question": "q", "choices": ["1"], "answer": 0, "subject": "a"}, "f:1: 4 choices and an answer"),
        ("mmlu", {"question": "q", "choices": list("abcd"), "answer": 4, "subject": "a"}, "f:1: 4 choices and an"),
        ("mmlu", {"question": "q", "choices": list("abcd"), "answer": "E", "subject": "a"}, "f:1: 4 choices and an"),
        ("mbpp_plus", {"prompt": "p", "test_list": ["assert 1"]}, "f:1: field 'test_list' holds 1 test, 3 are needed"),
        ("agieval", {"task": "a", "query": "q", "choices": ["x"], "gold": [1]}, "f:1: field 'gold'"),
        ("agieval", {"task": "a", "question": "q", "options": ["x"], "label": "B"}, "f:1: label 'B' is none of the 1"),
        ("agieval", {"task": "a", "question": "q", "options": ["x"], "label": None}, "f:1: field 'label' has type nul"),
        ("ifeval", {"key": 1, "prompt": "p", "instruction_id_list": ["x"], "kwargs": []}, "f:1: 'kwargs' needs one"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used(name: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        rows_of(STOCK[name], [("f:1", record)], ["a"] if STOCK[name].subset else [""])
    assert str(error.value).startswith(message)


def test_records_go_to_their_subsets_in_order_up_to_the_limit() -> None:
    records = [(f"f:{n}", {"task": t, "input": str(n), "target": "t"}) for n, t in enumerate("babb")]
    rows = rows_of(STOCK["bbh"], records, ["a", "b", "c"], 3)
    assert {k: [r["input"] for r in v] for k, v in rows.items()} == {"b": ["0", "2"], "a": ["1"]}


def test_agievals_own_layout_becomes_its_zero_shot_prompt() -> None:
    """Worked by hand from AGIEval's prompt; `math` has no options."""
    record = {"task": "sat-en", "passage": "P. ", "question": "Q?", "options": ["(A)x", "(B)y"], "label": "B"}
    assert rows_of(STOCK["agieval"], [("f:1", record)], ["sat-en"])["sat-en"] == [
        {
            "query": "P. Q: Q? Answer Choices: (A)x (B)y\nA: Among A through B, the answer is",
            "choices": ["(A)x", "(B)y"],
            "gold": [1],
        }
    ]
    record = {
        "task": "math",
        "passage": None,
        "question": "1+1?",
        "options": None,
        "label": None,
        "answer": "2",
    }
    assert rows_of(STOCK["agieval"], [("f:1", record)], ["math"])["math"] == [
        {"query": "Q: 1+1?\nA: The answer is", "answer": "2"}
    ]


def test_a_folders_file_names_stand_for_the_subsets() -> None:
    record = {"task": "anatomy", "question": "q", "choices": list("abcd"), "answer": "2"}
    assert rows_of(STOCK["mmlu"], [("f:1", record)], ["anatomy"])["anatomy"][0]["answer"] == 2


def test_an_answer_of_mmlu_may_be_a_letter() -> None:
    records = [
        (f"f:{n}", {"subject": "a", "question": "q", "choices": list("abcd"), "answer": answer})
        for n, answer in enumerate(["D", " A ", 2])
    ]
    assert [row["answer"] for row in rows_of(STOCK["mmlu"], records, ["a"])["a"]] == [3, 0, 2]


def test_the_metric_asks_the_sandbox() -> None:
    """Two tasks: one of two programs passes, then one of one: (1/2 + 1) / 2 = 3/4."""
    seen: list[str] = []

    def run(text: str) -> Any:
        seen.append(text)
        return SimpleNamespace(passed="good" in text)

    metric = SandboxedCodeEval(run)
    score, _ = metric.compute(references=["t1", "t2"], predictions=[["good", "bad"], ["good"]], k=[1])
    assert score == {"pass@1": 0.75}
    assert len(seen) == 3
    with pytest.raises(ValueError, match="only pass@1"):
        metric.compute(references=["t"], predictions=[["good"]], k=[1, 10])


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("def f(): return 1", True),
        ("def f(): return 2", False),
        ("def f(): return 1\nimport sys\nsys.exit(0)", False),
        ("def f(): return 1\nif __name__ == '__main__':\n    raise SystemExit(0)", True),
        ("def f(: '''\\'", False),
    ],
)
def test_what_is_run_passes_only_if_the_tests_were_reached(code: str, passes: bool) -> None:
    """The programs are this test's own, so they are run as they are."""
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program(code, "assert f() == 1")], capture_output=True, check=False
    )
    assert (ran.returncode == 0) is passes


def test_the_stand_in_is_there_only_for_a_while() -> None:
    before = sys.modules.get("evaluate"), sys.modules.get("lm_eval.tasks.mbpp.utils")
    with sandboxed(lambda _: SimpleNamespace(passed=True)):
        import evaluate

        metric = evaluate.load("code_eval")
        sys.modules["lm_eval.tasks.mbpp.utils"] = ModuleType("bound to the sandbox")
    assert isinstance(metric, SandboxedCodeEval)
    assert (sys.modules.get("evaluate"), sys.modules.get("lm_eval.tasks.mbpp.utils")) == before


class _Filter:
    """lm-eval's filter ensemble: the first word."""

    name = "word"

    def apply(self, instances: Sequence[Any]) -> None:
        for instance in instances:
            instance.filtered_resps[self.name] = (instance.resps[0].split() or ["[invalid]"])[0]


class _Task:
    """lm-eval's task: right if the word is `gold`."""

    def __init__(self) -> None:
        self._filters = [_Filter()]

    def process_results(self, doc: Mapping[str, str], results: Sequence[str]) -> dict[str, Any]:
        if results[0] == "boom":
            raise IndexError("a scorer that is not made for this text")
        if results[0] == "sandbox":
            raise RacelabError("the sandbox is gone")
        return {"exact_match": np.float64(results[0] == doc["gold"]), "flags": [True, False]}


def _benchmark(n: int = 3, until: Any = ("STOP", ""), **decoding: Any) -> StockBenchmark:
    items = []
    for i in range(n):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}]
        instance = SimpleNamespace(
            request_type="generate_until",
            args=(json.dumps(messages), {"until": until, **decoding}),
            repeats=1,
            doc={"gold": f"a{i}"},
            resps=[],
            filtered_resps={},
        )
        items.append(Item(Example(f"t:{i}", "d", {}), _Task(), (instance,)))
    stock = STOCK["gsm8k"]
    return StockBenchmark(_with_primary(stock), tuple(items))


def _with_primary(stock: Any) -> Any:
    return replace(stock, primary="exact_match.word")


class _Subject:
    def __init__(self, texts: Sequence[str | None]) -> None:
        self.texts, self.wanted = texts, list[int]()

    def describe(self) -> Mapping[str, Any]:
        return {}

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        assert (len(asks), purpose) == (3, "gsm8k")
        self.wanted += wanted
        for i in wanted:
            text = self.texts[i]
            yield i, (Answer(text, error="" if text is not None else "no server"),)

    def close(self) -> None:
        """Nothing to close."""


def _examined(texts: Sequence[str | None], ids: Sequence[str] = ("t:0", "t:1", "t:2")) -> list[Any]:
    return list(LmEvalExaminer(_benchmark(), _Subject(texts)).examine(frozenset(ids)))


def test_marks_rows_and_the_stop_string() -> None:
    right, wrong, blank = _examined(["a0 STOP a9", "b", ""])
    assert right.marks[0].score == 1.0
    assert right.marks[0].details == {"exact_match.word": 1.0, "flags.word": [1.0, 0.0]}
    assert right.answers[0]["text"] == "a0 STOP a9"
    assert (right.answers[0]["extracted"], right.answers[0]["score"]) == ("a0", 1.0)
    assert (wrong.marks[0].score, wrong.marks[0].status) == (0.0, "scored")
    assert (blank.marks[0].score, blank.marks[0].status) == (0.0, "unparsed")


def test_only_the_wanted_are_asked_and_lost_ones_have_no_score() -> None:
    subject = _Subject(["a0", None, "a2"])
    examiner = LmEvalExaminer(_benchmark(), subject)
    lost, last = examiner.examine(frozenset(["t:1", "t:2", "other"]))
    assert subject.wanted == [1, 2]
    assert (lost.marks[0].status, lost.answers[0]["error"]) == ("lost", "no server")
    assert math.isnan(lost.marks[0].score)
    assert (last.example.example_id, last.marks[0].score) == ("t:2", 1.0)
    assert list(examiner.examine(frozenset())) == []


def test_a_scorer_that_falls_over_marks_that_answer_only() -> None:
    first, second, _ = _examined(["boom", "a1", "a2"])
    assert (first.marks[0].score, first.marks[0].status) == (0.0, "unparsed")
    assert first.answers[0]["error"] == "lm-eval could not mark it: IndexError"
    assert second.marks[0].score == 1.0


def test_a_sandbox_that_is_gone_ends_the_evaluation() -> None:
    with pytest.raises(RacelabError, match="sandbox is gone"):
        _examined(["sandbox", "a1", "a2"])


def test_decoding_is_the_tasks() -> None:
    def ask(**decoding: Any) -> Ask:
        return ask_of(_benchmark(1, **decoding).items[0])

    assert ask() == Ask("q0", max_tokens=256, temperature=0.0, top_p=1.0, system="s", stop=("STOP",))
    assert ask(do_sample=False, temperature=0.7).temperature == 0.0
    sampled = ask(do_sample=True, temperature=0.7, top_p=0.9, max_gen_toks=32, until="Q:")
    assert (sampled.temperature, sampled.top_p, sampled.max_tokens, sampled.stop) == (0.7, 0.9, 32, ("Q:",))


class _Rates:
    """Log-probs by place; counts tokens as characters."""

    eos_id, window = 0, 12

    def __init__(self) -> None:
        self.prefixes: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(f"<{system}>{user}:")

    def generate(self, requests: Any, rng: Any) -> Any:
        raise AssertionError

    def logprobs(self, groups: Any, temperature: float = 1.0) -> list[list[Any]]:
        self.prefixes += [self.decode(prefix) for prefix, _ in groups]
        return [[np.log([0.5] * len(tail)) for tail in tails] for _, tails in groups]


class _RatedTask:
    """Takes the choice with the highest log-prob."""

    def __init__(self) -> None:
        self._filters = [SimpleNamespace(name="none", apply=self._first)]

    def _first(self, instances: Sequence[Any]) -> None:
        for instance in instances:
            instance.filtered_resps["none"] = instance.resps[0]

    def process_results(self, doc: Any, results: Sequence[tuple[float, bool]]) -> dict[str, float]:
        best = max(range(len(results)), key=lambda i: results[i][0])
        return {"acc": float(best == doc["gold"])}


def test_choices_are_rated_by_log_probs_and_a_long_prompt_loses_its_beginning() -> None:
    """Choices of 3 and 2 tokens at 1/2 each: 3 ln(1/2) = -2.079442 and 2 ln(1/2) = -1.386294, so the second.

    A window of 12 leaves 9 for the prompt, whose 12 characters lose 3.
    """
    messages = json.dumps([{"role": "system", "content": "s"}, {"role": "user", "content": "question"}])
    requests = tuple(
        SimpleNamespace(
            request_type="loglikelihood",
            args=(messages, choice),
            doc={"gold": 1},
            resps=[],
            filtered_resps={},
        )
        for choice in ("abc", "de")
    )
    benchmark = StockBenchmark(STOCK["agieval"], (Item(Example("t:0", "d", {}), _RatedTask(), requests),))
    model = _Rates()
    with pytest.raises(ConfigError, match="agieval rates choices by log-probs"):
        LmEvalExaminer(benchmark, _Subject([]))
    (found,) = LmEvalExaminer(benchmark, _Subject([]), model=model).examine(frozenset(["t:0"]))
    assert (found.marks[0].score, found.marks[0].details) == (1.0, {"acc": 1.0})
    assert model.prefixes == ["question:"]
    assert found.answers[0]["text"] == "de"
    assert json.loads(found.answers[0]["extracted"]) == [-2.079442, -1.386294]
    assert found.answers[0]["error"] == "the prompt's first 3 tokens do not fit"

"""Protocol `lm-eval` against lm-eval itself: same records, same answers, same prompts, every metric equal."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.evaluation.harness.code_metric import sandboxed
from racelab.experiments.evaluation.harness.examiner import LmEvalExaminer, ask_of
from racelab.experiments.evaluation.harness.loading import StockBenchmark, load_stock
from racelab.experiments.evaluation.harness.stock import STOCK
from racelab.experiments.evaluation.totals import Row, total
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Examiner

pytestmark = pytest.mark.slow
RECORDS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "eval" / "harness.json").read_text(encoding="utf-8")
)
"""A few hand-made records of each benchmark that lm-eval has."""
_SAYINGS = {
    "3 pens": "We add. The answer is 6.",
    "5 pens": "so it is 9",
    "700 pens": "1,400 pens. Q: and 700 more? 7",
    "not ( True )": "The answer is False.",
    "True or False": "It is true.\nThe answer is True.",
    "False and True": "That is True",
    "pear apple": "apple pear",
    "Which day": "Not (A). The answer is (B).",
    "two cats": "three animals in all",
    "Bone 1": "The best answer is B.",
    "Bone 2": "The best answer is A. No: the best answer is C",
    "Bone 3": "D",
    "Virus": "The best answer is C.",
    "Q: 1+1": "$2$",
    "without commas": "Hello, all of you.\nNothing here has one",
    "lower case": "good morning to everyone here, how are you",
    "Write add2": "def add2(a, b):\n    return a + b\n[DONE] def",
}
"""Part of a question -> the answer: some right under every filter, some under one, some wrong."""
PRIMARY = {
    "gsm8k": 2 / 3,  # 6 and 1,400 are found, 9 is not 10
    "bbh": 5 / 6,  # all but `False and True`; "three" is 3
    "mmlu": 2 / 6,  # bones 1 and 2
    "gpqa": 3 / 6,  # every second particle
    "ifeval": 1.0,  # the first loosely: its first line, which has the comma, is left out
    "mbpp_plus": 1 / 2,
}
"""Worked by hand. AGIEval's log-probs are drawn."""


def write(folder: Path, name: str) -> Path:
    """The records of a benchmark as a file."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[name]), encoding="utf-8")
    return path


def saying(user: str) -> str:
    """An answer that depends on the question alone."""
    question = user.rsplit("[BEGIN]", 2)[-2] if "[BEGIN]" in user else user
    muon = re.search(r"\(([A-D])\) muon ([024])", question)
    if muon:
        return f"Neither (A) nor (B) is sure. The answer is ({muon[1]})."
    return next((text for part, text in _SAYINGS.items() if part in question), "I do not know")


def likelihood(user: str, choice: str) -> float:
    """A log-prob that depends on question and choice alone."""
    return -1.0 - zlib.crc32(f"{user}|{choice}".encode()) % 1000 / 64


class ScriptedSubject:
    """Answers with `saying`."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.lost = lost
        self.asked: list[Ask] = []

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "scripted"}

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        for i in reversed(wanted):
            self.asked.append(asks[i])
            lost = i in self.lost
            yield i, (Answer(None, False, 0, "no server") if lost else Answer(saying(asks[i].user), True, 7),)

    def close(self) -> None:
        """Nothing to close."""


class ScriptedModel:
    """Log-probs by `likelihood`; a token is a character, and only the last of a choice counts."""

    eos_id = 0
    window = 10_000

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(user)

    def generate(self, requests: Any, rng: Any) -> Any:
        raise AssertionError("only log-probs are asked for")

    def logprobs(self, groups: Any, temperature: float = 1.0) -> list[list[Any]]:
        return [
            [
                np.array([0.0] * (len(tail) - 1) + [likelihood(self.decode(prefix), self.decode(tail))])
                for tail in tails
            ]
            for prefix, tails in groups
        ]


class _Ran:
    """A program that adds passes; nothing is run."""

    def __init__(self, program: str) -> None:
        self.passed = "return a + b" in program and "add2" in program


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any look at the network is a failure."""

    def refuse(*args: object, **_: object) -> None:
        raise AssertionError(f"network asked: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def _load(folder: Path, name: str, **options: Any) -> StockBenchmark:
    return load_stock(name, write(folder, name), run_code=_Ran, **options)


def _examined(benchmark: StockBenchmark) -> list[Examined]:
    examiner = LmEvalExaminer(benchmark, ScriptedSubject(), model=ScriptedModel())
    return list(examiner.examine(frozenset(e.example_id for e in examiner.examples)))


def _row(examined: Examined) -> Row:
    (mark,), example = examined.marks, examined.example
    return Row(mark.label, example.example_id, example.domain, mark.score, mark.status, mark.details)


@pytest.mark.parametrize("name", list(RECORDS))
def test_every_metric_equals_lm_evals_own(name: str, tmp_path: Path) -> None:
    """Totals over all examples equal the group's, those over a domain the task's, and the prompts are the same."""
    benchmark = _load(tmp_path, name)
    examined = _examined(benchmark)
    results, prompts = _stock_results(tmp_path, name, benchmark)

    assert sorted(i.args[0] for item in benchmark.items for i in item.instances) == sorted(prompts)
    assert len(examined) == len(RECORDS[name])
    compared = 0
    for item in _firsts(benchmark):
        of_task = [e for e in examined if e.example.domain == item.example.domain]
        compared += _compare(of_task, results[item.task.task_name], name)
    assert compared >= 1
    if name in PRIMARY:
        assert total(name, [_row(e) for e in examined], "lm-eval").value == pytest.approx(PRIMARY[name])
    if STOCK[name].subset:
        metric, _, key = STOCK[name].primary.partition(".")
        expected = results["golden"][f"{metric},{key or 'none'}"]
        assert total(name, [_row(e) for e in examined], "lm-eval").value == pytest.approx(expected, abs=1e-12)


def _compare(examined: list[Examined], result: dict[str, Any], name: str) -> int:
    ours = total(name, [_row(e) for e in examined], "lm-eval")
    assert ours.n == result["sample_len"]
    found = {k: v for k, v in result.items() if "," in k and "_stderr" not in k}
    for key, value in found.items():
        metric, _, kind = key.partition(",")
        plain = metric if kind == "none" else f"{metric}.{kind}"
        got = ours.value if plain == STOCK[name].primary else ours.more[plain]
        assert got == pytest.approx(value, abs=1e-12), key
    return len(found)


def _stock_results(folder: Path, name: str, benchmark: StockBenchmark) -> tuple[dict[str, Any], list[str]]:
    """What `simple_evaluate` makes of the same records, read from files by `datasets`; and the prompts it built."""
    import lm_eval
    import lm_eval.tasks
    from lm_eval.api.model import LM

    class ScriptedLM(LM):
        """Returns what the scripted subject does, cut at the stop strings as lm-eval's models do."""

        tokenizer_name = "scripted"

        def __init__(self) -> None:
            super().__init__()
            self.prompts: list[str] = []

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return json.dumps(chat_history)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            from lm_eval.models.utils import postprocess_generated_text

            self.prompts += [r.args[0] for r in requests]
            return [
                postprocess_generated_text(saying(_user(r.args[0])), r.args[1].get("until"), None)
                for r in requests
            ]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            self.prompts += [r.args[0] for r in requests]
            return [(likelihood(_user(r.args[0]), r.args[1]), False) for r in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise AssertionError("no task of ours asks for it")

    stock = STOCK[name]
    stock_folder = Path(lm_eval.tasks.__file__).parent / stock.folder
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(stock_folder))
    group = (manager.task_index[stock.task].cfg or {}) if stock.subset else {}
    spec = {
        "group": "golden",
        "task": [_on_files(folder, item, stock.subset) for item in _firsts(benchmark)],
        "aggregate_metric_list": group.get("aggregate_metric_list"),
    }
    (folder / "golden.yaml").write_text(json.dumps(spec), encoding="utf-8")
    both = [str(stock_folder), str(folder)]
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=both)
    lm = ScriptedLM()
    with sandboxed(_Ran):
        found = lm_eval.simple_evaluate(
            lm,
            tasks=["golden"],
            task_manager=manager,
            apply_chat_template=True,
            fewshot_as_multiturn=False,
            bootstrap_iters=0,
            confirm_run_unsafe_code=True,
            log_samples=False,
        )
    assert found is not None
    return found["results"], lm.prompts


def _user(context: str) -> str:
    return str([m["content"] for m in json.loads(context) if m["role"] == "user"][-1])


def _firsts(benchmark: StockBenchmark) -> Iterator[Any]:
    """One item of each task."""
    seen: set[str] = set()
    for item in benchmark.items:
        if item.task.task_name not in seen:
            seen.add(item.task.task_name)
            yield item


def _on_files(folder: Path, item: Any, subset: str) -> dict[str, Any]:
    """The task as lm-eval has it, over a file of its records."""
    records = RECORDS["agieval" if "agieval" in item.task.task_name else _ours(item)]
    rows = [r for r in records if not subset or r[subset] == item.example.domain]
    path = folder / f"{item.task.task_name}.json"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    files = dict.fromkeys(("train", "test"), str(path))
    return {
        "task": item.task.task_name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
    }


def _ours(item: Any) -> str:
    return next(name for name, stock in STOCK.items() if item.task.task_name.startswith(stock.task))


@pytest.mark.parametrize("name", list(RECORDS))
def test_loading_leaves_no_trace(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Environment, Python's generator, the log level, `evaluate` and the terminal are as they were."""
    import lm_eval.tasks  # noqa: F401  (what the import itself changes is not ours)

    before = (
        dict(os.environ),
        random.getstate(),
        logging.getLogger("lm_eval").level,
        sys.modules.get("evaluate"),
    )
    _examined(_load(tmp_path, name))
    after = (
        dict(os.environ),
        random.getstate(),
        logging.getLogger("lm_eval").level,
        sys.modules.get("evaluate"),
    )
    assert before == after
    assert "HF_ALLOW_CODE_EVAL" not in os.environ
    assert "lm_eval.tasks.mbpp.utils" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_part_of_the_examples_gives_the_same_marks(tmp_path: Path) -> None:
    """Going on with what is missing gives what one go gives, in GPQA too, where the choices are shuffled."""
    whole = {e.example.example_id: e for e in _examined(_load(tmp_path, "gpqa"))}
    random.random()
    benchmark = _load(tmp_path, "gpqa")
    examiner: Examiner = LmEvalExaminer(benchmark, ScriptedSubject())
    ids = [e.example_id for e in examiner.examples]
    parts = [*examiner.examine(frozenset(ids[:2])), *examiner.examine(frozenset(ids[2:]))]
    assert {e.example.example_id: e for e in parts} == whole
    assert set(ids) == set(whole)


def test_limit_takes_the_first_and_keeps_their_ids(tmp_path: Path) -> None:
    every = _load(tmp_path, "bbh")
    three = _load(tmp_path, "bbh", limit=3)
    assert {i.example.example_id for i in three.items} == {
        "bbh_cot_zeroshot_boolean_expressions:0",
        "bbh_cot_zeroshot_boolean_expressions:1",
        "bbh_cot_zeroshot_word_sorting:0",
    }
    assert {i.example.example_id for i in three.items} <= {i.example.example_id for i in every.items}
    assert {i.example.domain for i in three.items} == {"boolean_expressions", "word_sorting"}


def test_what_is_asked(tmp_path: Path) -> None:
    """The task's own decoding; lm-eval's 256 tokens only where the task has no bound, and ours below both."""
    gsm8k = _load(tmp_path, "gsm8k").items[0]
    assert ask_of(gsm8k).max_tokens == 256
    assert ask_of(gsm8k, 4096).max_tokens == 4096
    assert ask_of(gsm8k).user == "Q: Ann has 3 pens and buys 3. How many?\nA: Let's think step by step."
    assert ask_of(gsm8k).stop == ("Q:", "</s>", "<|im_end|>")
    assert (ask_of(gsm8k).temperature, ask_of(gsm8k).n, ask_of(gsm8k).system) == (0.0, 1, None)
    ifeval = _load(tmp_path, "ifeval").items[0]
    assert [ask_of(ifeval, bound).max_tokens for bound in (None, 99, 9999)] == [1280, 99, 1280]
    assert ask_of(ifeval).user == RECORDS["ifeval"][0]["prompt"]
    bbh = ask_of(_load(tmp_path, "bbh").items[0])
    assert bbh.system == "Evaluate the result of a random Boolean expression.\n\n"
    mbpp = ask_of(_load(tmp_path, "mbpp_plus").items[0])
    assert mbpp.user.count("[BEGIN]") == 4  # three examples and the question
    assert mbpp.user.endswith("assert add2(1, 2) == 3\n[BEGIN]\n")


def test_from_the_hub_only_what_is_asked_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split and configuration are the task's, MMLU's data set is the one that can be read, and the limit ends it."""
    import datasets

    fetched: list[tuple[str, str, str | None]] = []

    def load_table(name: str, split: str, words: object, *, config: str | None = None) -> Any:
        fetched.append((name, split, config))
        kind = {
            "cais/mmlu": "mmlu",
            "SaylorTwift/bbh": "bbh",
            "Idavidrein/gpqa": "gpqa",
            "openai/gsm8k": "gsm8k",
        }
        drop = ("subject", "task")
        return datasets.Dataset.from_list(
            [{k: v for k, v in r.items() if k not in drop} for r in RECORDS[kind[name]]]
        )

    monkeypatch.setattr("racelab.experiments.evaluation.harness.loading.load_table", load_table)
    assert [len(load_stock(name).items) for name in ("gsm8k", "gpqa")] == [3, 6]
    assert [len(load_stock(name, limit=8).items) for name in ("bbh", "mmlu")] == [8, 8]
    assert fetched == [
        ("openai/gsm8k", "test", "main"),
        ("Idavidrein/gpqa", "train", "gpqa_main"),
        ("SaylorTwift/bbh", "test", "boolean_expressions"),
        ("SaylorTwift/bbh", "test", "causal_judgement"),
        ("cais/mmlu", "test", "abstract_algebra"),
        ("cais/mmlu", "test", "anatomy"),
    ]


def test_code_needs_a_sandbox(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a sandbox"):
        load_stock("mbpp_plus", write(tmp_path, "mbpp_plus"))


def test_values_of_several_types_are_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    records = [{**RECORDS["ifeval"][1], "kwargs": [{"num_words": value}]} for value in (3, "three")]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    with pytest.raises(DataError, match="ifeval: a column has values of several types"):
        load_stock("ifeval", path)


_CACHED: dict[str, StockBenchmark] = {}


@pytest.mark.parametrize("name", list(RECORDS))
@given(
    text=st.text(max_size=60)
    | st.sampled_from(["[invalid]", "\\boxed", "\\frac", "$$", "The answer is (", "```"])
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_text_gets_a_mark(name: str, text: str, tmp_path: Path) -> None:
    """Whatever a model writes, each example of each task is marked with a finite score."""

    class Says(ScriptedSubject):
        def answers(self, asks: Any, wanted: Any, purpose: str) -> Any:
            return ((i, (Answer(text),)) for i in wanted)

    if name not in _CACHED:
        _CACHED[name] = _load(tmp_path, name)
    examiner = LmEvalExaminer(_CACHED[name], Says(), model=ScriptedModel())
    for examined in examiner.examine(frozenset(e.example_id for e in examiner.examples)):
        assert 0.0 <= examined.marks[0].score <= 1.0
        json.dumps(
            [dict(row) for row in examined.answers] + [dict(examined.marks[0].details)], allow_nan=False
        )

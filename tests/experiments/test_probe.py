"""The rubric probe: which prompts, when, what it counts, and that a run with it can be killed and resumed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.configs.compose import compose
from racelab.configs.schema import Config
from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.data.package import read_package
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.models.chat import Calls, ChatRequest, Reply
from racelab.experiments.models.generator import Candidate
from racelab.experiments.models.redundancy import ChatRedundancy, EncoderRedundancy, make_redundancy
from racelab.experiments.models.rubric import RubricSettings, parse_rubric
from racelab.experiments.probe import RECTANGLE, RubricProbe, due, group_statistics, probe_prompts
from racelab.experiments.rng import Streams
from racelab.experiments.run import Hooks, LoopSettings, Progress, loop, restore
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import JudgeItem, JudgeScores, Prompt, Sample, StepRecord

from .tiny_run import overrides, write_tiny_model

NAN = math.nan
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def sample(text: str) -> Sample:
    return Sample((1,), (-1.0,), text, True)


# which prompts


def test_the_hundred_prompts_cover_what_the_paper_names():
    """Math, code, constrained writing, science and emotional support (§6.2), and the prompt of Tables 9 and 10."""
    prompts = probe_prompts(100)
    assert list(prompts) == read_package("probe")
    assert {"math", "code", "constrained", "science", "support"} <= {p.category for p in prompts}
    (rectangle,) = (p for p in prompts if p.prompt_id == RECTANGLE)
    assert rectangle.text == (
        "The perimeter of a rectangle is 48. What is the largest possible area of the rectangle?"
    )


@FEW
@given(st.integers(1, 100))
def test_fewer_prompts_are_spread_over_the_categories(n: int):
    chosen, all_of = probe_prompts(n), Counter(p.category for p in read_package("probe"))
    assert len(chosen) == len({p.prompt_id for p in chosen}) == n
    assert RECTANGLE in {p.prompt_id for p in chosen}
    counts = Counter(p.category for p in chosen)
    most = max(counts.values())
    assert all(counts[c] >= min(most - 1, total) for c, total in all_of.items())
    if n > 1:
        assert {p.prompt_id for p in probe_prompts(n - 1)} < {p.prompt_id for p in chosen}


# when


@pytest.mark.parametrize(
    ("at_steps", "step", "flags", "label"),
    [
        (["start", "middle", "end"], 0, {}, "start"),
        (["start", "middle", "end"], 3, {}, ""),
        (["start", "middle", "end"], 3, {"middle": True}, "middle"),
        (["start", "middle", "end"], 6, {"end": True}, "end"),
        (["start", "middle", "end"], 1, {"middle": True, "end": True}, "end"),  # a budget of one update
        ([50, 350], 50, {}, "step 50"),
        ([50, 350], 51, {"middle": True, "end": True}, ""),
        ([50, "end"], 50, {"end": True}, "end"),  # one probe, not two
        ([0], 0, {}, "step 0"),
        ([], 0, {"end": True}, ""),
    ],
)
def test_when_a_probe_is_due(at_steps: list[int | str], step: int, flags: dict[str, bool], label: str):
    assert due(at_steps, step, **flags) == label


@pytest.mark.parametrize(("budget", "middle"), [(8, 4), (7, 4), (1, 1)])
def test_the_middle_is_the_policy_update_that_reaches_half(budget: int, middle: int):
    """A rubric step that comes after it, with the same count of policy updates, is not the middle."""
    probe = make_probe("probe.at_steps=[middle]")
    hits = []
    for done in range(1, budget + 1):
        for phase in ("policy", "rubric"):
            status = {"phase": phase, "policy_step": done, "policy_budget": budget}
            if probe.due(StepRecord(done, {}, {}, status), False):
                hits.append((done, phase))
    assert hits == [(middle, "policy")]


# what it counts


class Writer:
    """A generator whose rubrics and responses are scripted by prompt; every prompt but `long` fits the window."""

    def __init__(self, rubric: str = "- Gives 144 | 3\n- Is short | 1", long: str = "") -> None:
        self.rubric, self.long = rubric, long
        self.settings = SimpleNamespace(parsing=RubricSettings(format="lines"))
        self.draws: list[float] = []

    def rubric_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.prompt_id == self.long:
            raise DataError("too long")
        return (1,)

    response_prefix = rubric_prefix

    def rubrics(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[list[Candidate]]:
        self._draw(rng)
        parsed = [parse_rubric(self.rubric, self.settings.parsing, p.text) for p in prompts]
        return [[Candidate(sample(self.rubric), x.rubric, x.valid)] * n for x in parsed]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[tuple[Sample, ...]]:
        self._draw(rng)
        return [tuple(sample(str(i)) for i in range(n)) for _ in prompts]

    def _draw(self, rng: Any) -> None:
        import torch

        self.draws.append(float(torch.rand(1, generator=rng)))


class Scorer:
    """Scores 0.8 and 1.0 in turn; NaN where there is no rubric."""

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        rows = [
            np.array([NAN if item.rubric is None else (0.8, 1.0)[i % 2] for i in range(len(item.responses))])
            for item in items
        ]
        return JudgeScores(tuple(rows))


class Axes:
    """An encoder with one axis per first letter, so that criteria of one letter say the same."""

    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(256)[[ord(t[0]) for t in texts]] if texts else np.zeros((0, 256))

    def forget(self) -> None:
        pass


@cache
def config_of(*words: str) -> Config:
    return compose(words).config


def make_probe(*words: str, redundancy: Any = None, seed: int = 0) -> RubricProbe:
    return RubricProbe(config_of(*words).probe, seed, redundancy)


def take(probe: RubricProbe, writer: Any, step: int = 7, backend: Any = None) -> StepRecord:
    judge: Any = Scorer()
    return probe.take(writer, backend, judge, label="middle", step=step)


def test_a_probe_golden():
    """Criteria of 9 and 8 characters under 3 of 1 as weights, the same for 12 prompts: 144 is specific, 1/2.

    Rewards (0.8, 1, 0.8): mean 13/15, deviation sqrt(2)/15; none equal, all at or above 0.8.
    """
    writer = Writer()
    record = take(make_probe("probe.prompts=12", "probe.group_size=3"), writer)
    m = {k.removeprefix("race/probe/"): v for k, v in record.metrics.items()}
    assert m.pop("perf/time/probe_s") >= 0
    assert m == {
        "n_prompts": 12.0, "left_out": 0.0, "json_valid_frac": 1.0, "n_criteria_mean": 2.0,
        "criterion_chars_mean": 8.5, "label_only_frac": 1.0, "specific_frac": 0.5, "constraint_frac": 0.0,
        "grounded_frac": 0.0, "negation_frac": 0.0, "examples_frac": 0.0, "correctness_frac": 0.0,
        "completeness_frac": 0.0, "max_weight_mean": 3.0, "top1_share_mean": 0.75, "weight_std_mean": 1.0,
        "n_groups": 12.0, "group_size": 3.0, "sigma_zero_frac": 0.0, "sigma_mean": pytest.approx(math.sqrt(2) / 15),
        "all_ge_0_8_frac": 1.0,
    }  # fmt: skip
    rows, groups = record.tables["rubric_probe"], record.tables["probe_groups"]
    assert (len(rows), len(groups)) == (24, 12)
    assert (rows[0]["step"], rows[0]["checkpoint"], rows[0]["criterion"]) == (7, "middle", "Gives 144")
    assert (groups[0]["step"], groups[0]["rewards"], groups[0]["all_ge_0_8"]) == (7, [0.8, 1.0, 0.8], True)


def test_every_probe_draws_the_same_from_generators_of_its_own():
    """100 prompts in five batches, rubrics and responses: ten generators, none of them a training stream."""
    first, second, other = Writer(), Writer(), Writer()
    take(make_probe(), first, step=1)
    take(make_probe(), second, step=9)
    take(make_probe(seed=1), other)
    assert first.draws == second.draws
    assert len({*first.draws, *other.draws}) == 20


def test_a_prompt_beyond_the_window_is_left_out_and_counted():
    record = take(make_probe("probe.prompts=5"), Writer(long=RECTANGLE))
    assert (record.metrics["race/probe/n_prompts"], record.metrics["race/probe/left_out"]) == (4.0, 1.0)
    assert RECTANGLE not in {r["prompt_id"] for r in record.tables["rubric_probe"]}
    nothing = take(make_probe("probe.prompts=1"), Writer(long=RECTANGLE))
    assert (nothing.metrics["race/probe/n_prompts"], nothing.tables) == (0.0, {})


class Roles:
    """A backend with several sets of weights; its writer's rubrics and answers name the one at hand."""

    policy = reference = None

    def __init__(self) -> None:
        self.role = "policy"

    def switch(self, role: str) -> None:
        self.role = role

    def update(self, batch: Any) -> None: ...

    def state_tensors(self) -> None: ...

    def state_meta(self) -> None: ...

    def load_state(self, tensors: Any, meta: Any) -> None: ...


def test_rubrics_come_from_the_weights_that_write_rubrics_and_answers_from_the_policys():
    seen: list[str] = []
    backend = Roles()

    class Spy(Writer):
        def _draw(self, rng: Any) -> None:
            seen.append(backend.role)

    take(make_probe("probe.prompts=3"), Spy(), backend=backend)
    assert seen == ["generator", "policy"]
    assert backend.role == "policy"


def test_rubrics_that_do_not_parse_have_a_row_and_no_group():
    record = take(make_probe("probe.prompts=3", redundancy=EncoderRedundancy(Axes(), 0.8)), Writer("noise"))
    assert record.metrics["race/probe/json_valid_frac"] == 0.0
    assert "race/probe/redundant_frac" not in record.metrics
    assert "race/probe/sigma_zero_frac" not in record.metrics
    rows = record.tables["rubric_probe"]
    assert [(r["json_valid"], r["redundant"], r["text"]) for r in rows] == [(False, None, "noise")] * 3
    assert "std" not in record.tables["probe_groups"][0]


def test_no_groups_are_sampled_where_none_are_wanted():
    record = take(make_probe("probe.prompts=3", "probe.group_size=0"), Writer())
    assert set(record.tables) == {"rubric_probe"}
    assert "race/probe/group_size" not in record.metrics


def test_groups_golden():
    """Table 13: of four groups one has a single score; (0.7 x 6): 0 though np.std says 1e-16; (0.8, 0.9): 0.05.

    (0.2, NaN, 0.6): 0.2. So 1/3 collapsed, mean (0 + 0.05 + 0.2)/3, 1/3 all at or above 0.8.
    """
    rewards = [np.array(r) for r in ([0.7] * 6, [0.8, 0.9], [0.2, NAN, 0.6], [NAN, 0.9])]
    metrics, rows = group_statistics([Prompt(str(i), "x") for i in range(4)], rewards, "end")
    assert metrics == {
        "n_groups": 3.0,
        "sigma_zero_frac": 1 / 3,
        "sigma_mean": pytest.approx(0.25 / 3),
        "all_ge_0_8_frac": 1 / 3,
    }
    assert [r.get("all_ge_0_8") for r in rows] == [False, True, False, None]
    assert rows[2]["rewards"] == [0.2, None, 0.6]


scores = st.one_of(st.integers(0, 100).map(lambda i: i / 100), st.just(NAN))


@FEW
@given(st.lists(st.lists(scores, min_size=1, max_size=6), min_size=1, max_size=6), st.randoms())
def test_group_statistics_are_shares_and_do_not_see_the_order(rewards: list[list[float]], random: Any):
    prompts = [Prompt(str(i), "x") for i in range(len(rewards))]
    metrics, _ = group_statistics(prompts, [np.array(r) for r in rewards], "end")
    shuffled = [random.sample(r, len(r)) for r in random.sample(rewards, len(rewards))]
    again, _ = group_statistics(prompts, [np.array(r) for r in shuffled], "end")
    assert again == pytest.approx(metrics)
    assert all(0 <= v <= 1 for k, v in metrics.items() if k != "n_groups")


# redundancy


RUBRICS = [
    (Prompt("a", "x"), ("Is short", "Is clear")),
    (Prompt("b", "x"), ("Is short", "Names x")),
    (Prompt("c", "x"), ("Is short",)),
]


def test_close_criteria_are_redundant_and_one_alone_is_not():
    """Same first letter: cosine 1; otherwise 0. The rubrics are read one by one."""
    assert EncoderRedundancy(Axes(), 0.8).redundant(RUBRICS) == [True, False, False]
    assert EncoderRedundancy(Axes(), 0.0).redundant(RUBRICS) == [True, True, False]
    assert EncoderRedundancy(Axes(), 0.8).redundant([]) == []


def test_a_criterion_that_stands_there_twice_is_redundant_and_nobody_is_asked():
    """Unit rows can have a product below 1 with themselves; here the bound is beyond every cosine."""
    twice = [(Prompt("a", "x"), ("Is short", "Names x", "is  short."))]
    assert EncoderRedundancy(Axes(), 2.0).redundant([*twice, *RUBRICS]) == [True, False, False, False]
    chat = Chat("no", "yes")
    assert ChatRedundancy(chat).redundant([*twice, *RUBRICS]) == [True, False, True, False]
    assert len(chat.asked) == 2


@pytest.mark.parametrize("limit", [1, 10])
def test_a_rubric_of_one_line_over_and_over_is_redundant(limit: int):
    """Two criteria, three lines each: the parser would keep two, or the first alone."""
    writer = Writer("\n".join(["- Gives 144 | 3", "- Is short | 1"] * 3))
    writer.settings.parsing = RubricSettings(format="lines", max_criteria=limit)
    record = take(make_probe("probe.prompts=3", redundancy=EncoderRedundancy(Axes(), 0.8)), writer)
    assert record.metrics["race/probe/redundant_frac"] == 1.0
    assert record.metrics["race/probe/n_criteria_mean"] == 6.0
    assert len(record.tables["rubric_probe"]) == 18


class Chat:
    """Replies as scripted."""

    calls = Calls()

    def __init__(self, *replies: str | None) -> None:
        self.replies, self.asked = replies, []

    def complete(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        self.asked += requests
        return [Reply(text, finished=text is not None) for text in self.replies]

    def describe(self) -> dict[str, object]:
        return {}


def test_the_judge_is_asked_once_per_rubric_that_could_be_redundant():
    chat = Chat("<think>No doubt.</think>\nYES", "No, they differ.")
    assert ChatRedundancy(chat).redundant(RUBRICS) == [True, False, False]
    assert len(chat.asked) == 2
    assert "1. Is short\n2. Names x" in chat.asked[1].user
    assert ChatRedundancy(Chat()).redundant(RUBRICS[2:]) == [False]


def test_the_answer_stands_at_the_end_of_a_reply_with_reasons():
    chat = Chat(
        "At first sight no pair is needless, but 2 follows from 1. YES", "Is 2 implied? Yes and no. NO"
    )
    assert ChatRedundancy(chat).redundant(RUBRICS) == [True, False, False]


def test_a_reply_that_failed_or_says_nothing_is_unknown_and_counted():
    assert ChatRedundancy(Chat(None, "Perhaps")).redundant(RUBRICS) == [None, None, False]
    probe = make_probe("probe.prompts=3", redundancy=ChatRedundancy(Chat("yes", "no", "perhaps")))
    record = take(probe, Writer())
    assert record.metrics["race/probe/redundant_frac"] == 0.5
    assert record.metrics["race/probe/redundant_unread"] == 1.0
    assert [r["redundant"] for r in record.tables["rubric_probe"][::2]] == [True, False, None]


def test_the_config_names_who_decides():
    parts: dict[str, Any] = {"encoder": Axes(), "cosine": 0.8}
    assert make_redundancy("none", **parts) is None
    assert isinstance(make_redundancy("encoder", **parts), EncoderRedundancy)
    for kind in ("judge", "api"):
        assert isinstance(make_redundancy(kind, **parts, chat=Chat()), ChatRedundancy)
        with pytest.raises(ConfigError, match=f"probe.redundancy={kind}"):
            make_redundancy(kind, **parts)


# kill and resume


@dataclass(frozen=True)
class Count:
    """The state of a method that only counts."""

    step: int = 0

    def state(self) -> dict[str, Any]:
        return {"step": self.step}


class Counting:
    """Ten policy steps; the one weight is their sum."""

    def __init__(self) -> None:
        self.weight = 0.0

    def done(self, state: Count) -> bool:
        return state.step >= 10

    def load(self, state: dict[str, Any]) -> Count:
        return Count(**state)

    def step(self, state: Count) -> tuple[Count, StepRecord]:
        after = replace(state, step=state.step + 1)
        self.weight += after.step
        status = {"phase": "policy", "policy_step": after.step, "policy_budget": 10}
        return after, StepRecord(after.step, {"train/reward/mean": self.weight}, {}, status)

    # backend, stream and parts in one
    def state_tensors(self) -> dict[str, Any]:
        import torch

        return {"w": torch.tensor(self.weight)}

    def load_state(self, tensors: Any, meta: Any = None) -> None:
        if meta is not None:
            self.weight = float(tensors["w"])

    def state_meta(self) -> dict[str, Any]:
        return {}

    state = state_meta

    def forget(self) -> None:
        pass


class KilledError(Exception):
    """Stands for SIGKILL: nothing after it runs."""


def attempt(
    run: RunFolder,
    stop: Any,
    kill_after: int = 0,
    stop_in: int = 0,
    every: int = 4,
    validate_every: int = 0,
    stop_validating: int = 0,
) -> Counting:
    """One attempt as a session makes it.

    Killed right after the probe of a step, or asked to stop in a step or in the validation after it.
    """
    words = ["probe.at_steps=[2,middle,8,end]", f"checkpoint.every={every}", "eval.at_steps=[3]"]
    words += [f"validation.every={validate_every}"]
    config, method = config_of(*words), Counting()
    parts: Any = SimpleNamespace(backend=method, stream=method, rng=Streams(0), forget=method.forget)
    store = CheckpointStore(run.path / "checkpoints", 1, config.eval.at_steps)
    checkpoint = store.load_latest() if store.steps() else None
    start = checkpoint.step if checkpoint else (-1 if run.attempts() else 0)
    cut = checkpoint.state["tracker"] if checkpoint else None
    tracker = SpoolTracker(run, run.begin_attempt(start, cut), ship=False)
    progress = restore(checkpoint, method, parts) if checkpoint else Progress(Count())

    def probe(label: str, step: int) -> None:
        rows: list[dict[str, object]] = [{"step": step, "checkpoint": label, "weight": method.weight}]
        tracker.record(StepRecord(step, {"race/probe/n_prompts": 1.0}, {"rubric_probe": rows}))
        if step == kill_after:
            raise KilledError

    def validate(step: int) -> bool:
        if step == stop_validating:
            stop.signum = signal.SIGTERM
            return False
        rows: list[dict[str, object]] = [{"step": step, "weight": method.weight}]
        tracker.record(StepRecord(step, {"val/n": 1.0}, {"val_examples": rows}))
        return True

    def show(record: StepRecord) -> None:
        stop.signum = signal.SIGTERM if record.step == stop_in else stop.signum

    taker = make_probe(*words)
    hooks = Hooks(show, lambda line: None, validate, taker.due, probe)
    settings = LoopSettings(
        config.validation.every,
        config.checkpoint.every,
        config.eval.at_steps,
        {"samples": config.run.samples_every},
    )
    loop(settings, method, parts, progress, tracker=tracker, store=store, stop=stop, hooks=hooks)
    return method


def new_run(root: Path) -> RunFolder:
    return RunFolder.create(root, "count", composed_yaml="", overrides=[], info={"seed": 0})


def probes(run: RunFolder) -> list[tuple[int, str, float]]:
    """What the spool still says of probes."""
    return [
        (row["step"], row["checkpoint"], row["weight"])
        for record in read_spool(run)
        if record["kind"] == "rows" and record["table"] == "rubric_probe"
        for row in record["rows"]
    ]


def validations(run: RunFolder) -> list[tuple[int, float]]:
    """What the spool still says of validations."""
    return [
        (row["step"], row["weight"])
        for record in read_spool(run)
        if record["kind"] == "rows" and record["table"] == "val_examples"
        for row in record["rows"]
    ]


def running() -> Any:
    return SimpleNamespace(signum=0)


WHOLE = [(2, "step 2", 3.0), (5, "middle", 15.0), (8, "step 8", 36.0), (10, "end", 55.0)]
"""The weight after n steps is n (n + 1) / 2."""


def test_an_undisturbed_run_takes_each_probe_once_and_keeps_pinned_checkpoints(tmp_path: Path):
    run = new_run(tmp_path)
    attempt(run, running())
    assert probes(run) == WHOLE
    steps = CheckpointStore(run.path / "checkpoints").steps()
    assert 3 in steps  # eval.at_steps, though checkpoints come at 4 and 8
    assert max(steps) == 10


@pytest.mark.parametrize(("step", "every"), [(2, 1), (2, 100), (5, 4), (8, 4), (10, 1), (10, 4)])
def test_killed_right_after_a_probe_leaves_it_once(tmp_path: Path, step: int, every: int):
    run = new_run(tmp_path)
    with pytest.raises(KilledError):
        attempt(run, running(), kill_after=step, every=every)
    with pytest.raises(KilledError):  # and again, at the same place
        attempt(run, running(), kill_after=step, every=every)
    method = attempt(run, running(), every=every)
    assert sorted(probes(run)) == WHOLE
    assert method.weight == 55.0


@pytest.mark.parametrize("step", [2, 8, 10])
def test_a_stop_before_a_probe_owes_it_to_the_next_attempt(tmp_path: Path, step: int):
    run = new_run(tmp_path)
    attempt(run, running(), stop_in=step)
    assert step not in [s for s, *_ in probes(run)]
    assert CheckpointStore(run.path / "checkpoints").load_latest().step == step
    with pytest.raises(KilledError):  # the owed probe is taken, and lost with the kill
        attempt(run, running(), kill_after=step)
    attempt(run, running())
    assert sorted(probes(run)) == WHOLE


VALIDATED = [(4, 10.0), (8, 36.0)]


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("where", ["stop_in", "stop_validating"])
@pytest.mark.parametrize("every", [1, 4, 100])
def test_a_stop_before_a_validation_owes_it_to_the_next_attempt(
    tmp_path: Path, step: int, where: str, every: int
):
    run = new_run(tmp_path)
    attempt(run, running(), every=every, validate_every=4, **{where: step})
    assert step not in [s for s, _ in validations(run)]
    if step == 8:  # the probe comes after the validation, and is owed with it
        assert 8 not in [s for s, *_ in probes(run)]
        with pytest.raises(KilledError):  # both are taken, and lost with the kill
            attempt(run, running(), kill_after=8, every=every, validate_every=4)
    attempt(run, running(), stop_validating=step, every=every, validate_every=4)  # stopped there once more
    attempt(run, running(), every=every, validate_every=4)
    assert validations(run) == VALIDATED
    assert sorted(probes(run)) == WHOLE


def test_a_checkpoint_of_before_has_no_validation_owed(tmp_path: Path):
    run = new_run(tmp_path)
    attempt(run, running(), stop_in=8, validate_every=4)
    checkpoint = CheckpointStore(run.path / "checkpoints").load_latest()
    assert checkpoint.state["owed_validation"] is True
    del checkpoint.state["owed_validation"]
    method = Counting()
    parts: Any = SimpleNamespace(backend=method, stream=method, rng=Streams(0), forget=method.forget)
    assert restore(checkpoint, method, parts).owed_validation is False  # type: ignore[arg-type]


# the real thing


def racelab(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "racelab.cli.main", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def only_run(root: Path) -> RunFolder:
    return RunFolder.open(next(p.parent for p in root.glob("*/run.json")))


def weights(run: RunFolder) -> bytes:
    return (max((run.path / "checkpoints").glob("step-*")) / "tensors.safetensors").read_bytes()


def probe_rows(run: RunFolder) -> list[tuple[str, int, str]]:
    tables = ("rubric_probe", "probe_groups")
    return sorted(
        (r["table"], r["step"], str(r["rows"])) for r in read_spool(run) if r.get("table") in tables
    )


def words(model: Path, root: Path, at_steps: str) -> list[str]:
    small = {"probe.at_steps": at_steps, "probe.prompts": 5, "probe.group_size": 2, "run.max_steps": 7}
    return overrides(model, root, **small, **{"run.policy_updates": 8, "validation.temperatures": "[1.0]"})


@pytest.mark.slow
def test_a_real_run_with_probes_trains_as_one_without_and_survives_a_kill_after_one(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    roots = [tmp_path / name for name in ("with", "without", "killed")]
    finish(racelab(*words(model, roots[0], "[start,middle,end]")))
    finish(racelab(*words(model, roots[1], "[]")))
    process = racelab(*words(model, roots[2], "[start,middle,end]"))
    end = time.monotonic() + 120
    while not any(b'"checkpoint":"middle"' in p.read_bytes() for p in roots[2].glob("*/spool/*.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    finish(racelab("--resume", str(only_run(roots[2]).path)))
    whole, without, killed = map(only_run, roots)
    assert weights(whole) == weights(without) == weights(killed)
    assert probe_rows(without) == []
    assert probe_rows(killed) == probe_rows(whole)
    assert {(table, step) for table, step, _ in probe_rows(whole)} == {
        (table, step) for table in ("rubric_probe", "probe_groups") for step in (0, 6, 7)
    }

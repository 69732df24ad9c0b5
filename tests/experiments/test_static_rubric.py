"""Static rubrics: asked for once per prompt, kept in the state, asked for again only where none came."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError
from racelab.experiments.methods.baselines.rar import rar
from racelab.experiments.methods.baselines.rrd import rrd
from racelab.experiments.methods.baselines.static_rubric import prompted
from racelab.experiments.models.api import ApiModel, ApiSettings
from racelab.experiments.models.chat import Calls, ChatRequest
from racelab.experiments.models.generator import Candidate, SamplingSettings
from racelab.experiments.models.prompts.templates import RUBRIC_JSON
from racelab.experiments.models.proposals import proposal_sampling
from racelab.experiments.models.rubric import RubricSettings, parse_rubric
from racelab.experiments.rng import derived_seed
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool
from racelab.experiments.types import Prompt

from .api_server import ApiServer
from .scripted_chat import (
    G,
    ScriptedChat,
    World,
    calls,
    lasting,
    method_config,
    parts,
    rubric_json,
    sample,
)
from .tiny_run import overrides, write_tiny_model

GOOD = rubric_json(("Says why", 0.6), ("Is short", 0.4))


def by_number(texts: tuple[str, ...], i: int) -> float:
    return [0.1, 0.9, 0.3, 0.5][i]


def api(world: World, chat: Any, *overrides: str, updates: int = 10) -> Any:
    config = method_config("prompted-api", *overrides)
    return prompted(config, parts(world, chat), policy_updates=updates, max_steps=None)


def test_a_prompt_is_asked_about_once_in_a_run():
    """Two prompts in all, two a step: 2 rubrics in the first step and none later; 2 G judge calls a step."""
    world, chat = World(by_number, prompts=2), ScriptedChat(lambda r: GOOD)
    method = api(world, chat)
    state, first = method.step(method.start())
    state, second = method.step(state)
    assert [r.user for r in chat.requests] == [
        RUBRIC_JSON.render(prompt=f"Explain matter {i}") for i in range(2)
    ]
    assert {(r.system, r.temperature, r.draw) for r in chat.requests} == {(RUBRIC_JSON.system, 0.0, 0)}
    for kind, found in {
        "rubric_gen": [(2, 2, 2), (0, 0, 2)],
        "external_calls": [(2, 2, 2), (0, 0, 2)],
        "judge_eval": [(2 * G, 2 * G, 2 * G)] * 2,
        "policy_gen": [(2 * G, 2 * G, 2 * G)] * 2,
    }.items():
        assert [calls(first, kind), calls(second, kind)] == found, kind
    assert first.metrics["health/cost_mismatch"] == second.metrics["health/cost_mismatch"] == 0
    assert first.tables["static_rubrics"] == [
        {"step": 1, "prompt_id": f"p{i}", "text": GOOD, "n_criteria": 2, "source": "api", "tries": 1}
        for i in range(2)
    ]
    assert second.tables.get("static_rubrics", []) == []
    assert [first.metrics[k] for k in ("train/static_rubric/asked_frac",)] == [1.0]
    assert second.metrics["train/static_rubric/asked_frac"] == 0.0
    assert [[c.text for c in i.rubric.criteria] for i in world.judged if i.rubric] == [
        ["Says why", "Is short"]
    ] * 4
    assert first.tables["samples"][0]["rubric_text"] == GOOD
    assert len(world.batches[0].groups) == 2


def test_what_cannot_be_used_is_nan_costs_no_judge_call_and_is_asked_again_with_another_draw():
    """p0 never gets a reply, p1 gets prose and then JSON in a fence."""

    def reply(request: ChatRequest) -> str | None:
        if "matter 0" in request.user:
            return None
        return f"Here:\n```json\n{GOOD}\n```" if request.draw == 1 else "I would look at clarity."

    world, chat = World(by_number, prompts=2), ScriptedChat(reply)
    method = api(world, chat)
    state, first = method.step(method.start())
    assert dict(state.drawn) == {"p0": 1, "p1": 1}
    assert calls(first, "judge_eval") == (0, 0, 2 * G)
    assert calls(first, "rubric_gen") == (2, 2, 2)
    assert first.metrics["health/rubric_parse_fail"] == 1.0
    assert first.metrics["health/cost_mismatch"] == 0
    assert first.metrics["race/route/invalid_frac"] == 1.0
    assert [(r["text"], r["n_criteria"]) for r in first.tables["static_rubrics"]] == [
        (None, 0),
        ("I would look at clarity.", 0),
    ]
    assert world.batches[0].groups == ()
    state, second = method.step(state)
    assert [r.draw for r in chat.requests] == [0, 0, 1, 1]
    assert (dict(state.drawn), list(state.rubrics)) == ({"p0": 2}, ["p1"])
    assert calls(second, "judge_eval") == (G, G, 2 * G)
    assert second.tables["groups"][0]["rewards"] == [None] * G
    assert second.tables["groups"][1]["rewards"] == [0.1, 0.9, 0.3, 0.5]
    assert [g.prefix for g in world.batches[1].groups] == [(7, 1)]


def test_what_a_cache_answers_is_counted_as_such():
    """So a step that is repeated after a kill logs the same calls, and what was paid can be told."""
    chat = ScriptedChat(lambda r: GOOD, remember=True)
    for cached in (0, 2):
        method = api(World(by_number, prompts=2), chat)
        _, record = method.step(method.start())
        assert calls(record, "external_calls") == (2, 2, 2)
        assert record.metrics["cost/api/cached"] == cached
        assert calls(record, "rubric_gen") == (2, 2, 2)
        assert record.metrics["health/cost_mismatch"] == 0


def test_the_api_writes_json_whatever_the_format_of_the_policys_own_role():
    world = World(by_number)
    method = api(
        world,
        ScriptedChat(lambda r: rubric_json(("One thing", 1), ("Another thing", 1), ("A third", 1))),
        "method.rubric.format=lines",
        "method.rubric.max_criteria=2",
    )
    _, record = method.step(method.start())
    assert [r["n_criteria"] for r in record.tables["static_rubrics"]] == [2, 2]
    assert [len(i.rubric.criteria) for i in world.judged if i.rubric] == [2, 2]


def test_the_embedded_preset_keeps_the_five_criteria_that_the_template_allows():
    from racelab.configs.compose import compose

    method = compose(["preset=embedded", "method=prompted-api"]).config.method
    chat = ScriptedChat(lambda r: rubric_json(*[(f"Says thing {w}", 1) for w in ("a", "b", "c", "d", "e")]))
    run = prompted(method, parts(World(lambda texts, i: i / 10), chat), policy_updates=1, max_steps=None)
    _, record = run.step(run.start())
    assert {r["n_criteria"] for r in record.tables["static_rubrics"]} == {5}


def test_a_prompt_that_comes_twice_in_a_step_is_asked_about_once():
    """Equal rewards send both groups back; two rounds over two prompts meet each of them twice."""
    chat = ScriptedChat(lambda r: GOOD)
    method = api(World(lambda t, i: 0.5, prompts=2), chat, "method.active_sampling_rounds=2")
    _, record = method.step(method.start())
    assert len(chat.requests) == 2
    assert calls(record, "rubric_gen") == (2, 2, 2)
    assert calls(record, "judge_eval") == (4 * G, 4 * G, 2 * G)
    assert record.metrics["train/static_rubric/asked_frac"] == 0.5
    assert record.metrics["health/cost_mismatch"] == 0


def test_the_clients_counts_are_sums_over_the_rounds_of_a_step():
    """Three rounds of two new prompts each, and p3 never gets a reply: 6 requests, 1 failed, 5 x 7 tokens."""

    class Counting(ScriptedChat):
        @property
        def calls(self) -> Calls:
            had = self._calls.made - self._calls.failed
            return self._calls + Calls(prompt_tokens=7 * had, completion_tokens=9 * had, retried=2 * had)

    chat = Counting(lambda r: None if "matter 3" in r.user else GOOD)
    method = api(World(lambda t, i: 0.5), chat, "method.active_sampling_rounds=3")
    state, first = method.step(method.start())
    _, second = method.step(state)
    counts = [
        {k.rpartition("/")[2]: v for k, v in r.metrics.items() if k.startswith("cost/api/")}
        for r in (first, second)
    ]
    assert counts == [
        {"cached": 0, "retried": 10, "failed": 1, "prompt_tokens": 35, "completion_tokens": 45},
        {"cached": 0, "retried": 12, "failed": 0, "prompt_tokens": 42, "completion_tokens": 54},
    ]
    assert calls(first, "external_calls") == (6, 6, 2)


def test_a_resumed_run_goes_on_with_the_same_rubrics():
    """The proposer never says the same twice, so asking again would change the rubric and the step."""
    said = iter(range(1000))

    def reply(request: ChatRequest) -> str:
        n = next(said)
        return "nothing" if n == 1 else rubric_json((f"Criterion number {n}", 1.0))

    def numbered(texts: tuple[str, ...], i: int) -> float:
        return ((int(texts[0].split()[-1]) + 1) * (i + 1) % 7) / 7

    world = World(numbered, prompts=3)
    method = api(world, ScriptedChat(reply))
    state = method.start()
    for _ in range(3):  # p1's first reply is of no use, and p1 comes again in step 3
        state, _ = method.step(state)
    assert len(state.rubrics) == 3
    stored = json.loads(json.dumps(state.state()))
    again = World(numbered, prompts=3)
    again.taken = world.taken
    resumed = api(again, ScriptedChat(reply))
    assert resumed.load(stored) == state
    (after, record), (after_again, record_again) = method.step(state), resumed.step(resumed.load(stored))
    assert lasting(record) == lasting(record_again)
    assert after == after_again
    assert world.batches[-1].n_samples == again.batches[-1].n_samples > 0
    assert state.policy_steps == 3  # a step leaves the state it was given as it was


def test_the_budget_ends_the_one_phase():
    method = api(World(by_number), ScriptedChat(lambda r: GOOD), updates=2)
    state = method.start()
    assert method.finish(state, "interrupted") == []
    while not method.done(state):
        state, _ = method.step(state)
    (row,) = method.finish(state, "budget")
    assert (state.step, row["kind"], row["length"], row["end_reason"]) == (2, "policy", 2, "budget")


class Role:
    """The rubric role of an untrained model that writes down its generator's seed."""

    def __init__(self, parses: bool = True) -> None:
        self.settings, self.parses = RubricSettings("lines"), parses
        self.seen: list[tuple[str, int]] = []

    def rubrics(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[list[Candidate]]:
        ((prompt,), seed) = (prompts, rng.initial_seed())
        assert n == 1
        self.seen.append((prompt.prompt_id, seed))
        text = f" Names seed {seed % 1000} of it | 2" if self.parses else "noise"
        parsed = self.parse(text, prompt)
        return [[Candidate(sample(text), parsed.rubric, parsed.valid)]]

    def parse(self, text: str, prompt: Prompt) -> Any:
        return parse_rubric(text, self.settings, prompt.text)


def policy_role(world: World, role: Role, seed: int = 5) -> Any:
    config = method_config("prompted-policy")
    return prompted(config, parts(world, None, role, seed), policy_updates=9, max_steps=None)


def test_the_untrained_policy_draws_a_rubric_by_prompt_and_seed_alone():
    role, other = Role(), Role()
    world, later = World(by_number, prompts=4), World(by_number, prompts=4)
    method = policy_role(world, role)
    state, record = method.step(method.start())
    state, _ = method.step(state)
    assert role.seen == [(f"p{i}", derived_seed(5, f"static-rubric:p{i}")) for i in range(4)]
    later.taken = 2
    policy_role(later, other).step(policy_role(later, other).start())
    assert other.seen == role.seen[2:]
    assert "cost/calls/external_calls" not in record.metrics
    assert calls(record, "rubric_gen") == (2, 2, 2)
    assert record.metrics["health/cost_mismatch"] == 0
    assert {r["source"] for r in record.tables["static_rubrics"]} == {"untrained"}
    assert record.metrics["perf/rollout/tokens_per_s"] > 0


def test_an_unusable_draw_of_the_untrained_policy_is_drawn_anew_the_next_time():
    role = Role(parses=False)
    method = policy_role(World(by_number, prompts=2), role)
    state, first = method.step(method.start())
    assert calls(first, "judge_eval")[:2] == (0, 0)
    role.parses = True
    state, second = method.step(state)
    assert [s for _, s in role.seen[2:]] == [derived_seed(5, f"static-rubric:p{i}", 1) for i in range(2)]
    assert (list(state.rubrics), dict(state.drawn)) == (["p0", "p1"], {})
    assert calls(second, "judge_eval")[:2] == (2 * G, 2 * G)


@pytest.mark.parametrize(("name", "make"), [("prompted-api", prompted), ("rar", rar), ("rrd", rrd)])
def test_no_model_to_ask_is_an_error_at_the_start(name, make):
    with pytest.raises(ConfigError, match=r"method\.proposer=api: the run has no model"):
        make(
            method_config(name),
            parts(World(by_number), None),
            policy_updates=1,
            max_steps=None,
        )


def test_sampling_of_the_proposer():
    from racelab.configs.compose import compose

    config = compose(["method=rar", "api.max_tokens=777", "method.rubric.max_tokens=55"]).config
    assert proposal_sampling(config.method, config.api) == SamplingSettings(777, 0.0)
    config = compose(["method=rar", "method.proposer=untrained", "method.rubric.temperature=0.7"]).config
    assert proposal_sampling(config.method, config.api).temperature == 0.7


@pytest.mark.parametrize(("name", "make"), [("prompted-api", prompted), ("rar", rar), ("rrd", rrd)])
def test_over_a_real_client_and_a_server(name, make, tmp_path):
    """The server's answers depend on the request alone; with a cache, a second run asks nobody."""
    world = World(lambda texts, i: (sum(map(len, texts)) * (i + 2)) % 11 / 10, prompts=2)
    with ApiServer() as server:
        settings = ApiSettings(server.url, "m", key_env="", cache_dir=tmp_path, max_retries=0)
        for run in range(2):
            model = ApiModel(settings)
            config = method_config(name, f"method.prompts_per_step={2}")
            method = make(config, parts(world, model), policy_updates=3, max_steps=None)
            _, record = method.step(method.start())
            assert record.metrics["health/cost_mismatch"] == 0
            assert record.metrics["health/rubric_parse_fail"] == 0
            measured, _, printed = calls(record, "external_calls")
            cached = record.metrics["cost/api/cached"]
            assert measured >= printed
            asked = len(server.requests) if run == 0 else 0
            assert asked == measured - cached
            assert (record.metrics["cost/api/prompt_tokens"] > 0) == (run == 0)
            assert all(math.isfinite(r) for g in record.tables["groups"] for r in g["rewards"])


_ONLY_RACE = ("method.pool", "method.phase", "method.routing", "method.entries")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompted-api", "prompted-policy", "rar", "rrd"])
def test_through_the_command(name, tmp_path):
    """A tiny model whose noise counts as a rubric. Six prompts, three a step: static rubrics are there by step 3."""
    model, root = write_tiny_model(tmp_path / "model"), tmp_path / "runs"
    words = [w for w in overrides(model, root) if not w.startswith(_ONLY_RACE)]
    words += [f"method={name}", "run.max_steps=3", "api.cache=false", "--json"]
    with ApiServer() as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "racelab.cli.main", "train", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    (folder,) = [p for p in root.iterdir() if (p / "run.json").exists()]
    steps: dict[int, dict[str, float]] = {1: {}, 2: {}, 3: {}}
    ids = []
    for record in read_spool(RunFolder.open(folder)):
        if record["kind"] == "metrics" and record["step"] in steps:
            steps[record["step"]] |= record["values"]
        elif record["kind"] == "rows" and record["table"] == "static_rubrics":
            ids += [row["prompt_id"] for row in record["rows"]]
    assert [v["health/cost_mismatch"] for v in steps.values()] == [0, 0, 0]
    assert all("train/reward/mean" in v for v in steps.values())
    asked = sum(v["cost/calls/external_calls"] for v in steps.values()) if name != "prompted-policy" else 0
    assert len(server.requests) == asked
    if name != "rrd":
        assert [v["cost/calls/rubric_gen"] for v in steps.values()] == [3, 3, 0]
        assert len(set(ids)) == len(ids) == 6

"""Controller replay: hand-worked decisions, scripted runs that must come out again, faults that must be found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.analysis.replay import OPEN, Replayed, replay
from racelab.analysis.replay_diff import differences, to_json
from racelab.analysis.replay_log import KIND, Log, build_log, integrity, load_log
from racelab.analysis.replay_plot import plot
from racelab.configs.compose import compose, to_yaml
from racelab.configs.schema import Config
from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.methods.grpo import mean, sigma
from racelab.experiments.methods.race.routing import tie_rate
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.methods.race.step import Race
from racelab.experiments.parts import Parts
from racelab.experiments.rng import Streams
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker

from ..experiments.test_race_step import World

NAN = math.nan
FEW = settings(max_examples=30, deadline=None, derandomize=True)
G, N = 4, 3


@cache
def base() -> dict[str, Any]:
    return compose(["tracking=none", "data=package", "data.limit=null"]).config.model_dump()


def configured(values: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> Config:
    """A config with other values, checked; composing each would take most of the time of these tests."""
    raw = deepcopy(dict(start or base()))
    for key, value in values.items():
        *path, last = key.split(".")
        reduce(dict.__getitem__, path, raw)[last] = value
    return Config.model_validate(raw)


def by(log: Log, own: Config, **other: Any) -> Replayed:
    """The replay of a log of `own` with other settings, e.g. `trqc__q_target`."""
    changes = {f"method.{key.replace('__', '.')}": value for key, value in other.items()}
    config: Any = configured(changes, own.model_dump()).method
    return replay(log, config, own.run, eps_tie(own))


def eps_tie(config: Any) -> float:
    found: float = config.method.routing.eps_tie
    return found


def found(log: Log, replayed: Replayed) -> list[tuple[int, str]]:
    return [(d.step, d.what) for d in differences(log, replayed)]


# By hand


def hand_config(**more: Any) -> Config:
    values: dict[str, Any] = {
        "method.routing.sigma_rt": 0.05, "method.routing.tau_tie": 0.9, "method.routing.d_tri": 0.1,
        "method.routing.d_emb": 0.1, "method.pool.min_pool": 1, "method.trqc.q_target": 0.2,
        "method.trqc.eps_q": 0.05, "method.trqc.alpha_q": 0.5, "method.trqc.eta_sigma": 0.01,
        "method.trqc.eta_tau": 0.02, "method.phase.alpha": 0.5, "method.phase.sigma_sw": 0.05,
        "method.phase.mu_sat": 0.8, "method.phase.tau_sat": 0.375, "method.phase.tau_imp": 0.02,
        "method.phase.window": 1, "method.phase.policy_window": 1, "method.phase.rubric_window": 1,
        "method.phase.policy_target": 4, "method.phase.rubric_target": 4, "method.phase.eta_policy": 0.04,
        "method.phase.eta_rubric": 0.004, "method.phase.max_rubric_steps": None,
    }  # fmt: skip
    return configured(values | {f"method.{key.replace('__', '.')}": value for key, value in more.items()})


def group(step: int, mean: float, std: float, tie_rate: float = 0.0, **more: Any) -> dict[str, Any]:
    values = {"mean": mean, "std": std, "tie_rate": tie_rate, "d_tri": 0.5, "d_emb": 0.5}
    return {"step": step, "rewards": [mean - std, mean + std], **values, **more}


def hand_log(*more_groups: dict[str, Any]) -> Log:
    """Two policy steps of two groups, then two rubric steps with mean rewards 0.5 and 0.51."""
    groups = [
        group(1, 0.9, 0.01),
        group(1, 0.5, 0.3),
        group(2, 0.85, 0.049),
        group(2, 0.5, 0.3),
        *more_groups,
    ]
    metrics = pd.DataFrame(
        {
            KIND: [0.0, 0.0, 1.0, 1.0, *(0.0 for _ in more_groups)],
            "race/rubric_reward/mean": [NAN, NAN, 0.5, 0.51, *(NAN for _ in more_groups)],
        },
        index=range(1, 5 + len(more_groups)),
    )
    return build_log(pd.DataFrame(groups), metrics, pd.DataFrame({"index": []}))


def test_four_steps_by_hand():
    """Step 1: q = 1/2, q_hat = 1/4, e = (1/4 - 1/5) / (1/5 + 1/20) = 1/5; sigma_rt = 1/20 - 1/500 = 0.048,
    tau_tie = 9/10 + 2/500 = 0.904; f_sat = 1/2, f_hat = 1/4 < 3/8.
    Step 2: 0.049 > 0.048 is informative, so q = 0, q_hat = 1/8, e = -3/10; sigma_rt = 0.048 + 0.003 = 0.051,
    tau_tie = 0.904 - 0.006 = 0.898; f_sat = 1/2, f_hat = 3/8 >= 3/8: rubric phase after 2 steps,
    e_P = (2 - 4) / 4 = -1/2, tau_sat = 0.375 + 0.02 = 0.395.
    Steps 3, 4: Delta = 0.51 - 0.5 = 0.01 <= 0.02: plateau after 2 steps, e_R = -1/2, tau_imp = 0.02 - 0.002 = 0.018.
    """
    own = hand_config()
    replayed = by(hand_log(), own)
    first, second, third, fourth = replayed.decisions
    assert [r.value for r in first.routes] == ["rubric_failed", "informative"]
    assert [r.value for r in second.routes] == ["informative", "informative"]
    assert (first.q_ema, first.f_ema, first.pool) == (0.25, 0.25, 1)
    assert (first.after.sigma_rt, first.after.tau_tie) == pytest.approx((0.048, 0.904), abs=1e-15)
    assert (second.q_ema, second.f_ema) == (0.125, 0.375)
    assert (third.before.sigma_rt, third.before.tau_tie) == pytest.approx((0.051, 0.898), abs=1e-15)
    assert math.isnan(third.event.delta_w)
    assert fourth.event.delta_w == pytest.approx(0.01, abs=1e-15)
    end = replayed.thresholds
    assert (end.tau_sat, end.tau_imp) == pytest.approx((0.395, 0.018), abs=1e-15)
    assert [(p["kind"], p["start"], p["end"], p["end_reason"]) for p in replayed.phases] == [
        ("policy", 1, 2, "saturation"),
        ("rubric", 3, 4, "plateau"),
    ]
    assert (replayed.end, replayed.parted) == ("log", None)


def test_once_the_phases_part_each_phase_takes_the_next_steps_of_its_kind():
    """tau_sat 0.2: f_hat = 1/4 switches at step 1. Steps 2 and 3 are the log's rubric steps 3 and 4, a plateau;
    tau_sat = 0.2 + 0.04 x 3/4 = 0.23. Step 4 is the log's policy step 2, f_hat = 1/4 >= 0.23: rubric, none left."""
    own = hand_config()
    log = hand_log(group(5, 0.5, 0.3))
    replayed = by(log, own, phase__tau_sat=0.2)
    assert [(d.step, d.fed.step, d.counterfactual) for d in replayed.decisions] == [
        (1, 1, False),
        (2, 3, True),
        (3, 4, True),
        (4, 2, True),
    ]
    assert replayed.parted == 2
    assert replayed.decisions[3].before.tau_sat == pytest.approx(0.23, abs=1e-15)
    assert (replayed.end, replayed.unused) == ("rubric", {"policy": 1, "rubric": 0})
    rows = to_json(log, replayed)["steps"]
    assert [row["kind"] for row in rows] == [
        {"logged": "policy", "replayed": "policy"},
        {"logged": "policy", "replayed": "rubric"},
        {"logged": "rubric", "replayed": "rubric"},
        {"logged": "rubric", "replayed": "policy"},
    ]
    assert (2, "phase_kind") in found(log, replayed)


def test_another_eps_tie_takes_tie_rates_from_the_rewards():
    """0.5, 0.52, 0.9, 0.1: one pair of six is closer than 0.025, none closer than 0.01, all six closer than 0.9.

    Of these only 6/6 >= tau_tie = 9/10 (about) is degenerate.
    """
    own = hand_config()
    log = hand_log(group(5, 0.505, 0.28, 1 / 6) | {"rewards": [0.5, 0.52, 0.9, 0.1]})
    replays = [by(log, own, routing__eps_tie=eps) for eps in (0.025, 0.01, 0.9)]
    assert [r.signals[-1].tie_rate for r in replays] == [1 / 6, 0.0, 1.0]
    assert [r.decisions[-1].fed.step for r in replays] == [5, 5, 5]
    assert [r.decisions[-1].routes[0].value for r in replays] == [
        "informative",
        "informative",
        "rubric_failed",
    ]
    assert replays[2].signals[-1].n_valid == 4


def test_a_phase_that_the_log_stops_in_is_open():
    own = hand_config(phase__tau_sat=0.9)
    replayed = by(hand_log(), own)
    assert [(p["kind"], p["end"], p["end_reason"]) for p in replayed.phases] == [("policy", 2, OPEN)]
    assert (replayed.end, replayed.unused) == ("policy", {"policy": 0, "rubric": 2})


# Scripted runs through the real method


@dataclass
class Scripted:
    """A run over random scores: its config, the method's last state and its folder."""

    config: Config
    state: RaceState
    folder: RunFolder

    @property
    def log(self) -> Log:
        return load_log(self.folder)

    @property
    def own(self) -> Replayed:
        return by(self.log, self.config)


class Dice(World):
    """Random scores; now and then equal answers, a rubric that cannot be used, a score that is missing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = np.random.default_rng(seed)

    def score(self, items: Any) -> Any:
        for item in items:
            centre, spread = self.dice.uniform(0.3, 1.0), self.dice.choice([0.0, 0.02, 0.2])
            row = np.round(np.clip(centre + spread * self.dice.normal(size=G), 0, 1), 3)
            row[self.dice.random(G) < 0.15] = NAN
            if item.rubric is not None and len(item.responses) == 2:
                self.pairs.append(tuple(self.dice.uniform(0, 1, 2)))
            elif item.rubric is not None:
                self.rewards.append(row)
        return super().score(items)

    def rollouts(self, prompts: Any, n: int, rng: Any) -> Any:
        groups = []
        for prompt in prompts:
            self.usable, self.diverse = self.dice.random() > 0.15, self.dice.random() > 0.3
            groups += super().rollouts([prompt], n, rng)
        return groups

    def rubrics(self, prompts: Any, n: int, rng: Any) -> Any:
        self.usable = self.dice.random() > 0.2
        return super().rubrics(prompts, n, rng)


WORDS = {
    "run.policy_updates": 30, "method.group_size": G,
    "method.prompts_per_step": N, "method.entries_per_rubric_step": 2, "method.routing.sigma_rt": 0.05,
    "method.routing.tau_tie": 0.9, "method.routing.d_tri": 0.6, "method.routing.d_emb": 0.25,
    "method.pool.min_pool": 1, "method.pool.min_margin": 0.0, "method.phase.alpha": 0.5,
    "method.phase.tau_sat": 0.3, "method.phase.sigma_sw": 0.05, "method.phase.mu_sat": 0.7,
    "method.phase.window": 1, "method.phase.policy_window": 2, "method.phase.rubric_window": 2,
    "method.phase.policy_target": 4, "method.phase.rubric_target": 3, "method.phase.eta_policy": 0.04,
    "method.phase.eta_rubric": 0.005, "method.phase.tau_sat_range": (0.05, 0.95),
    "method.phase.tau_imp_range": (-1.0, 0.05), "method.rubric_reward.min_grounded": 0,
    "method.rubric_reward.invalid_reward": None,
}  # fmt: skip


def scripted(
    root: Path, stop_after: int | None = None, close: str = "finished", more: Mapping[str, Any] | None = None
) -> Scripted:
    """Trains with random scores into a run folder; a training that stops early leaves its phase open."""
    config = configured({**WORDS, **(more or {})})
    race: Any = config.method
    world: Any = Dice(config.run.seed)
    parts = Parts(world, world, world, world, world, world, Streams(config.run.seed))
    budget = config.run.policy_updates
    method = Race(race, parts, policy_updates=budget, max_steps=config.run.max_steps)
    folder = RunFolder.create(
        root, "scripted", composed_yaml=to_yaml(config), overrides=[], info={"method": "race"}
    )
    with folder.lock():
        tracker = SpoolTracker(folder, folder.begin_attempt(), ship=False)
        state = method.start()
        while not method.done(state) and state.step != stop_after:
            state, record = method.step(state)
            tracker.record(record)
        if close:
            tracker.rows("phases", method.finish(state, "budget" if close == "finished" else "interrupted"))
            tracker.close(close)
    return Scripted(config, state, folder)


def reasons(run: Scripted) -> set[str]:
    return {str(p["end_reason"]) for p in run.log.phases}


def saw(*wanted: str) -> Callable[[Scripted], bool]:
    return lambda run: set(wanted) <= reasons(run)


def deferred(run: Scripted) -> bool:
    return run.state.phase.deferred > 2 and "saturation" in reasons(run)


def full_pool(run: Scripted) -> bool:
    return len(run.state.pool) == 3


def all_routes(run: Scripted) -> bool:
    return set(run.log.columns["route"]) == {"informative", "diversity_collapsed", "rubric_failed", "invalid"}


def calibrated(run: Scripted) -> bool:
    return len({round(v, 9) for v in run.log.columns["d_tri_star"]}) == 2


def held(run: Scripted) -> bool:
    return any(at.metrics.get("race/trqc/saturated") == 1.0 for at in run.log.steps)


CASES: dict[str, tuple[dict[str, object], Callable[[Scripted], bool]]] = {
    "event": ({}, saw("saturation", "plateau", "budget")),
    "all routes": ({}, all_routes),
    "fixed": ({"method.phase.mode": "fixed", "method.phase.fixed": (3, 2)}, saw("fixed")),
    "random": ({"method.phase.mode": "random"}, saw("random")),
    "static": (
        {f"method.trqc.eta_{k}": 0 for k in ("sigma", "tau")}
        | {f"method.phase.eta_{k}": 0 for k in ("policy", "rubric")},
        saw("saturation", "plateau"),
    ),
    "calibrated": ({"method.trqc.calibrate_steps": 4}, calibrated),
    "capped": (
        {"method.phase.window": 2, "method.phase.max_rubric_steps": 4, "method.phase.tau_imp": -0.9},
        saw("cap"),
    ),
    "deferred": ({"method.pool.min_pool": 20}, deferred),
    "small pool": ({"method.pool.capacity": 3, "method.pool.fill": "uniform"}, full_pool),
    "least margin": ({"method.pool.min_margin": 0.03, "method.pool.min_pool": 6}, deferred),
    "gain": ({"method.phase.plateau_signal": "gain"}, saw("plateau")),
    "sigma_zero": ({"method.routing.mode": "sigma_zero"}, saw("saturation")),
    "off": ({"method.routing.mode": "off", "method.pool.fill": "uniform"}, saw("saturation")),
    "another eps_tie": ({"method.routing.eps_tie": 0.1}, saw("saturation")),
    "at a bound": ({"method.routing.sigma_rt": 0.0, "method.trqc.eta_sigma": 0.2}, held),
    "hard limit": ({"run.max_steps": 17}, saw("budget")),
    "another seed": ({"run.seed": 7, "method.phase.mode": "random"}, saw("random")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_own_config_gives_every_decision_again(case: str, tmp_path: Path):
    more, happened = CASES[case]
    run = scripted(tmp_path, more=more)
    assert happened(run)
    log, replayed = run.log, run.own
    assert differences(log, replayed) == []
    assert replayed.thresholds == run.state.thresholds
    assert [d.pool for d in replayed.decisions][-1] == len(run.state.pool)
    assert integrity(log, eps_tie(run.config)) == {"mean": 0, "std": 0, "tie_rate": 0}
    assert (replayed.end, replayed.parted) == ("budget", None)
    assert [p["end_reason"] for p in replayed.phases] == [p["end_reason"] for p in log.phases]


@pytest.mark.parametrize(("close", "reason"), [("interrupted", "interrupted"), ("", OPEN)])
def test_a_run_that_stopped_early_agrees_too(close: str, reason: str, tmp_path: Path):
    run = scripted(tmp_path, stop_after=13, close=close)
    log, replayed = run.log, run.own
    assert len(replayed.decisions) == 13
    assert differences(log, replayed) == []
    assert (replayed.end, replayed.phases[-1]["end_reason"]) == ("log", reason)


def test_steps_that_were_redone_count_once(tmp_path: Path):
    run = scripted(tmp_path)
    before = to_json(run.log, run.own)
    (spool,) = run.folder.spool_dir.glob("*.jsonl")
    lines = [line for line in spool.read_text().splitlines() if json.loads(line)["kind"] != "end"]
    kept = [line for line in lines if json.loads(line)["step"] <= 9]
    offset = len("".join(f"{line}\n" for line in kept))
    with run.folder.lock():
        attempt = run.folder.begin_attempt(from_step=9, cut={"attempt": 1, "offset": offset, "last_step": 9})
        (run.folder.spool_dir / f"{attempt}.jsonl").write_text(
            "".join(f"{line}\n" for line in lines[len(kept) :])
        )
    assert to_json(run.log, run.own) == before


@pytest.fixture(scope="module")
def event_run(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    return scripted(tmp_path_factory.mktemp("event"))


def tables(run: Scripted) -> list[pd.DataFrame]:
    from racelab.analysis.load import load_metrics, load_table

    return [load_table(run.folder, "groups"), load_metrics(run.folder), load_table(run.folder, "phases")]


def wrong(table: int, column: str, at: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def spoil(frames: list[pd.DataFrame]) -> None:
        frame = frames[table]
        place = frame.columns.get_loc(column)
        frame.iloc[at, place] = change(frame.iloc[at, place])

    return spoil


FAULTS: dict[str, tuple[Callable[..., Any], list[tuple[int, str]]]] = {
    "threshold of a group": (wrong(0, "sigma_rt", 4, lambda v: v + 2e-12), [(2, "sigma_rt")]),
    "less than the tolerance": (wrong(0, "sigma_rt", 4, lambda v: v + 5e-13), []),
    "diversity threshold": (wrong(0, "d_emb_star", 0, lambda v: v + 0.1), [(1, "d_emb")]),
    "threshold among the metrics": (
        wrong(1, "race/trqc/tau_tie", 2, lambda v: v - 1e-9),
        [(3, "tau_tie")],
    ),
    "route": (
        wrong(0, "route", 1, lambda v: "informative" if v != "informative" else "invalid"),
        [(1, "route")],
    ),
    "saturated": (wrong(0, "saturated", 2, lambda v: not v), [(1, "saturated")]),
    "q_hat": (wrong(1, "race/trqc/q_ema", 0, lambda v: v + 1e-9), [(1, "q_ema")]),
    "f_hat": (wrong(1, "race/switch/f_sat_ema", 0, lambda v: v + 1e-9), [(1, "f_ema")]),
    "f_sat that is gone": (wrong(1, "race/switch/f_sat", 0, lambda v: NAN), [(1, "f_sat")]),
    "pool": (wrong(1, "race/pool/size", 1, lambda v: v + 1), [(2, "pool")]),
    "saturation of TRQC": (wrong(1, "race/trqc/saturated", 0, lambda v: 1.0), [(1, "trqc_saturated")]),
    "deferral": (wrong(1, "race/switch/deferred_switch", 0, lambda v: 1.0), [(1, "deferred_switch")]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_log_is_found_where_it_is(fault: str, event_run: Scripted):
    spoil, expected = FAULTS[fault]
    frames = tables(event_run)
    spoil(frames)
    log = build_log(*frames)
    assert found(log, by(log, event_run.config)) == expected


def test_faults_of_phases_and_of_the_rubric_clock_are_found(event_run: Scripted):
    frames = tables(event_run)
    row = frames[2].iloc[1]
    wrong(2, "tau_imp_after", 1, lambda v: v + 1e-9)(frames)
    wrong(2, "end_reason", 0, lambda v: "cap")(frames)
    first_rubric = int(np.flatnonzero(frames[1][KIND])[0])
    wrong(1, "race/switch/tau_imp", first_rubric, lambda v: v + 1e-9)(frames)
    log = build_log(*frames)
    assert found(log, by(log, event_run.config)) == [
        (first_rubric, "phase 0 end_reason"),
        (first_rubric + 1, "tau_imp"),
        (int(row["end"]), "phase 1 tau_imp_after"),
    ]


def test_a_phase_row_that_is_gone_is_found(event_run: Scripted):
    frames = tables(event_run)
    end = int(frames[2].iloc[1]["end"])
    frames[2] = frames[2].drop(index=frames[2].index[1])
    log = build_log(*frames)
    assert found(log, by(log, event_run.config)) == [(end, "phase 1")]


def test_rewards_that_do_not_fit_their_statistics_are_counted(event_run: Scripted):
    frames = tables(event_run)
    usable = [i for i, r in enumerate(frames[0]["rewards"]) if np.isfinite(r).all()]
    frames[0].at[usable[0], "rewards"] = [0.0, 0.1, 0.2, 0.4]
    frames[0].at[usable[1], "std"] = NAN
    log = build_log(*frames)
    counted = integrity(log, eps_tie(event_run.config))
    assert (counted["mean"], counted["std"]) == (1, 2)
    assert counted["tie_rate"] <= 1


def test_columns_that_an_older_log_lacks_are_not_compared(event_run: Scripted):
    groups, metrics, phases = tables(event_run)
    groups = groups.drop(columns=["saturated", "tau_sat", "mu_sat", "route"])
    metrics = metrics.drop(columns=["race/switch/f_sat", "race/pool/size"])
    log = build_log(groups, metrics, phases.drop(columns=["mu_sat_before"]))
    result = to_json(log, by(log, event_run.config))
    assert (result["n_differences"], result["routes"]["logged"]) == (0, {})


# Other settings


def test_q_target_moves_the_thresholds_from_the_second_step_on(event_run: Scripted):
    log = event_run.log
    own, other = event_run.own, by(log, event_run.config, trqc__q_target=0.6)
    first, second = ([d.before.sigma_rt for d in r.decisions] for r in (own, other))
    assert first[0] == second[0]
    assert second[1] > first[1]
    assert (1, "sigma_rt") not in found(log, other)
    assert (2, "sigma_rt") in found(log, other)
    assert (2, "tau_tie") in found(log, other)


def test_other_phases_end_with_a_reason(event_run: Scripted):
    replayed = by(event_run.log, event_run.config, phase__mode="fixed", phase__fixed=(1, 9))
    assert replayed.end == "rubric"
    assert replayed.unused["rubric"] == 0
    assert replayed.unused["policy"] > 0
    assert replayed.parted is not None
    lengths = [(p["kind"], p["length"]) for p in replayed.phases][:2]
    assert lengths == [("policy", 1), ("rubric", 9)]


def test_the_result_is_json_and_counts_its_differences(event_run: Scripted):
    log = event_run.log
    result = to_json(log, by(log, event_run.config, phase__tau_sat=0.9))
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again == result
    assert result["n_differences"] == len(result["differences"]) > 0
    assert result["differences"] == sorted(result["differences"], key=lambda d: d["step"])
    assert {"step", "what", "logged", "replayed"} <= set(result["differences"][0])
    assert result["thresholds"]["tau_sat"] == {
        "logged": event_run.state.thresholds.tau_sat,
        "replayed": 0.9,
    }


# Logs that cannot be replayed


def test_a_torn_last_step_is_left_out_and_any_other_gap_is_an_error(event_run: Scripted):
    groups, metrics, phases = tables(event_run)
    policy = metrics.index[metrics[KIND] == 0.0].tolist()
    torn = build_log(groups[groups["step"] < policy[-1]], metrics.loc[: policy[-1]], phases)
    assert len(torn.steps) == policy[-1] - 1
    with pytest.raises(DataError, match="policy step 1 is missing in table groups"):
        build_log(groups[groups["step"] > 1], metrics, phases)
    with pytest.raises(DataError, match="step 3 is missing in its metrics"):
        build_log(groups, metrics.drop(index=3), phases)
    with pytest.raises(DataError, match="steps that the metrics do not have"):
        build_log(groups, metrics.loc[: policy[-1] - 1], phases)
    with pytest.raises(DataError, match="column d_tri of table groups"):
        build_log(groups.drop(columns=["d_tri"]), metrics, phases)
    with pytest.raises(DataError, match="no rollout group in its log"):
        build_log(groups.head(0), metrics, phases)


# Properties


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Any groups and rubric rewards, in any order of policy and rubric steps; no decision is logged."""
    score = st.one_of(st.integers(0, 20).map(lambda i: i / 20), st.just(NAN))
    groups, metrics = [], []
    for step, rubric in enumerate(draw(st.lists(st.booleans(), min_size=1, max_size=12)), 1):
        if rubric:
            metrics.append({KIND: 1.0, "race/rubric_reward/mean": draw(score)})
            continue
        metrics.append({KIND: 0.0, "race/rubric_reward/mean": NAN})
        for _ in range(draw(st.integers(1, 3))):
            rewards = draw(st.lists(score, min_size=1, max_size=5))
            r = np.array(rewards)
            row = {"mean": mean(r), "std": sigma(r), "tie_rate": tie_rate(r, 0.1), "d_tri": 0.2, "d_emb": 0.2}
            groups.append({"step": step, "rewards": rewards, **row})
    if not groups:
        groups.append(
            {"step": len(metrics) + 1, "rewards": [0.5], **dict.fromkeys(("mean", "d_tri", "d_emb"), 0.5)}
        )
        groups[0] |= {"std": 0.0, "tie_rate": NAN}
        metrics.append({KIND: 0.0, "race/rubric_reward/mean": NAN})
    frame = pd.DataFrame(metrics, index=range(1, len(metrics) + 1))
    return build_log(pd.DataFrame(groups), frame, pd.DataFrame({"index": []}))


@cache
def static() -> Config:
    return hand_config(
        trqc__eta_sigma=0, trqc__eta_tau=0, phase__eta_policy=0, phase__eta_rubric=0, routing__eps_tie=0.1
    )


@FEW
@given(logs())
def test_zero_gains_keep_every_threshold(log: Log):
    replayed = by(log, static())
    first = replayed.decisions[0].before if replayed.decisions else replayed.thresholds
    assert all(d.before == d.after == first for d in replayed.decisions)
    assert replayed.thresholds == first


@FEW
@given(logs())
def test_a_replay_uses_each_step_once_and_in_its_order(log: Log):
    replayed = by(log, static())
    for kind, left in replayed.unused.items():
        used = [d.fed.step for d in replayed.decisions if d.kind.value == kind]
        assert used == [at.step for at in log.steps if at.kind.value == kind][: len(used)]
        assert len(used) + left == sum(at.kind.value == kind for at in log.steps)
    ends = [p["end"] for p in replayed.phases]
    assert [p["start"] for p in replayed.phases][1:] == [end + 1 for end in ends[:-1]]


@FEW
@given(logs())
def test_statistics_of_all_groups_at_once_are_those_of_one_by_one(log: Log):
    assert integrity(log, 0.1) == {"mean": 0, "std": 0, "tie_rate": 0}


# The plot


def colours(file: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    pixels = np.round(imread(file)[::3, :, :3] * 255).astype(np.int64) @ [1 << 16, 1 << 8, 1]
    return {(v >> 16, v >> 8 & 255, v & 255) for v in np.unique(pixels).tolist()}


BLUE, VERMILLION, SKY = (0, 114, 178), (213, 94, 0), (86, 180, 233)


@pytest.mark.parametrize("other", [{}, {"phase__tau_sat": 0.9}, {"trqc__q_target": 0.6}])
def test_the_plot_shows_both(event_run: Scripted, tmp_path: Path, other: dict[str, float]):
    file = tmp_path / "new" / "replay.png"
    log = event_run.log
    plot(log, by(log, event_run.config, **other), (0.2, 0.6), "A run", file)
    assert {BLUE, VERMILLION, SKY} <= colours(file)


def test_a_replay_of_one_step_can_be_drawn(event_run: Scripted, tmp_path: Path):
    groups, metrics, phases = tables(event_run)
    log = build_log(groups[groups["step"] == 1], metrics.loc[:1], phases.head(0))
    plot(log, by(log, event_run.config), (0.2, 0.2), "One step", tmp_path / "one.png")
    assert SKY in colours(tmp_path / "one.png")


def test_a_plot_that_cannot_be_written_names_the_mend(event_run: Scripted, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="name another with --plot"):
        plot(event_run.log, event_run.own, (0.2, 0.2), "A run", tmp_path / "file" / "replay.png")


def test_equal_values_are_equal(event_run: Scripted):
    """A replay is a function of its arguments: the random stream starts anew each time."""
    assert to_json(event_run.log, event_run.own) == to_json(event_run.log, replace(event_run).own)

"""Reachability: what ships is honest, each rule fires where it should, and its advice silences it.

Numbers by hand:

- G = 8 has 28 pairs; the largest tie rate below 1 is 27/28 = 0.964; 0.70 acts as 20/28 = 0.714.
- d_tri of 8 equal responses is 1/8 = 0.125; 1.05/8 = 0.13125.
- Eq 13 from 0 with alpha = 0.1 under full saturation: after 25 steps 1 - 0.9^25 = 0.928.
"""

from __future__ import annotations

import pytest

from racelab.configs.check import COLLAPSE_FLOOR, reachability
from racelab.configs.compose import compose
from racelab.configs.keys import groups

METHODS, VARIANTS = groups()["method"], groups()["variant"]
SANE = ["preset=sane"]
COARSE = ["preset=sane", "judge=qwen3-1.7b"]


def findings(*overrides: str) -> dict[str, str]:
    """Key -> reason."""
    return {finding.key: finding.reason for finding in reachability(compose(overrides).config)}


def test_the_embedded_and_the_sane_preset_can_reach_all_their_targets() -> None:
    assert findings("preset=embedded") == {}
    assert findings("preset=sane") == {}


@pytest.mark.parametrize("word", [f"method={m}" for m in METHODS] + [f"variant={v}" for v in VARIANTS])
def test_embedded_can_reach_its_targets_with_every_method_and_variant(word: str) -> None:
    """At its own budget and at the 8 updates of a short comparison."""
    config = compose([word]).config
    assert reachability(config) == []
    short = config.run.model_copy(update={"policy_updates": 8})
    assert reachability(config.model_copy(update={"run": short})) == []


FROM_THE_PAPER = {"method.trqc.q_target", "method.routing.d_tri", "method.phase.rubric_target"}
"""What Tables 7 and 16 print and no run can have."""


@pytest.mark.parametrize(
    ("preset", "word"),
    [("paper", f"method={m}") for m in METHODS]
    + [(p, f"variant={v}") for p in ("sane", "paper") for v in VARIANTS],
)
def test_the_other_presets_warn_of_printed_targets_only_and_the_advice_mends_them(
    preset: str, word: str
) -> None:
    """EvoLM: 500 policy steps and ten rubric phases of 50 end with step 1000, as far as Tables 1 and 2 go."""
    words = [f"preset={preset}", word]
    found = reachability(compose(words).config)
    rules = {"data.source"} if word == "method=rlcer" else set()  # Tulu 3's prompts have no rule: an error
    assert {f.key for f in found if f.severity == "error"} == rules
    assert {f.key for f in found} - rules <= (
        FROM_THE_PAPER if preset == "paper" else {"method.phase.rubric_target"}
    )
    if found:
        assert findings(*words, *(f.works for f in found)) == {}


def test_short_phases_are_found_to_be_shorter_than_two_windows() -> None:
    """Table 16 prints M* = 5 beside W = 5."""
    assert set(findings("preset=sane", "variant=short-phases")) == {"method.phase.rubric_target"}


def test_a_rubric_phase_that_never_ends_is_an_error_unless_something_limits_it() -> None:
    words = [*SANE, "method.phase.tau_imp=-2.1", "method.phase.tau_imp_range=[-3,0.05]"]
    endless = reachability(compose([*words, "method.phase.max_rubric_steps=null"]).config)
    assert [(f.severity, f.key) for f in endless] == [("error", "method.phase.tau_imp")]
    limited = reachability(
        compose([*words, "method.phase.max_rubric_steps=null", "run.max_steps=700"]).config
    )
    assert [f.severity for f in limited] == ["warning"]


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 3, 9])
@pytest.mark.parametrize("limit", ["null", "14"])
@pytest.mark.parametrize(
    "word", ["variant=full", "variant=fixed-50-50", "variant=random-phase-length", "method=evolm"]
)
def test_following_the_advice_ends_with_nothing_to_say(word: str, updates: int, limit: str) -> None:
    """Runs of every length. One override mends one thing, so that a next finding may come up; few rounds suffice."""
    words = [word, f"run.policy_updates={updates}", f"run.max_steps={limit}"]
    for _ in range(6):
        found = reachability(compose(words).config)
        if not found:
            return
        words.append(found[0].works)
    raise AssertionError(f"after {words}: {[f.line() for f in found]}")


def test_the_paper_preset_warns_of_the_quarantine_target_and_of_the_trigram_floor() -> None:
    found = findings("preset=paper")
    assert set(found) == {"method.trqc.q_target", "method.routing.d_tri"}
    assert "24.5 %" in found["method.trqc.q_target"]
    assert "1/8 = 0.125" in found["method.routing.d_tri"]


FIXED, RANDOM = "variant=fixed-50-50", "variant=random-phase-length"
STILL = "method.trqc.eta_tau=0"  # a run of one or two steps cannot move tau_tie either


def baseline(method: str, *overrides: str) -> list[str]:
    return ["preset=embedded", "run.policy_updates=32", f"method={method}", *overrides]


BASELINE_CASES: list[tuple[str, list[str], str]] = [
    ("method.fixed", baseline("evolm", "method.fixed=[32,3]"), "none comes after a rubric phase"),
    ("method.fixed", baseline("evolm", "run.max_steps=6"), "ends the run in its first rubric phase"),
    ("method.fixed", baseline("evolm", "method.fixed=[32,3]", "run.max_steps=32"), "no rubric is updated"),
    ("method.fixed", baseline("evolm", "method.fixed=[33,3]"), "no rubric is updated"),
    # 33 policy steps in phases of 3 are 11 phases, each with a rubric phase of 3: 66.
    (
        "probe.at_steps",
        baseline("evolm", "run.policy_updates=33", "probe.at_steps=[66,67]"),
        "ends with step 66",
    ),
    # 32 of them leave the last of 11 phases short of one step: ten rubric phases, 62.
    ("probe.at_steps", baseline("evolm", "probe.at_steps=[62,63]"), "ends with step 62"),
    ("method.entries_per_rubric_step", baseline("evolm", "method.buffer.capacity=2"), "2 answers"),
    ("method.buffer.min_age", baseline("evolm", "method.buffer.min_age=32"), "32 policy steps"),
    (
        "method.outcome_weight",
        baseline("rlcer", "method.outcome_weight=0", "method.cot_weight=0"),
        "reward 0",
    ),
    (
        "method.correlation_threshold",
        baseline("rlcer", "method.correlation_threshold=1"),
        "no item ever counts",
    ),
    ("method.item_threshold", baseline("rlcer", "method.item_threshold=0"), "correlates with nothing"),
    ("data.source", baseline("rlcer", "data=tulu3"), "no prompt has one"),
    ("data.check_field", baseline("rlcer", "data=file", "data.path=prompts.jsonl"), "no prompt has one"),
    # 32 policy steps, each with its rubric step: 64
    ("probe.at_steps", baseline("rlcer", "probe.at_steps=[64,65]"), "ends with step 64"),
    ("eval.at_steps", baseline("rlcer", "run.max_steps=9", "eval.at_steps=[9,10]"), "ends with step 9"),
    ("run.max_steps", baseline("rubric-arm", "run.max_steps=4"), "the first 4 steps"),
    ("probe.at_steps", baseline("rubric-arm", "probe.at_steps=[36,37]"), "ends with step 36"),  # 2 + 2 + 32
    ("method.decomposition_trigger", baseline("rrd", "method.decomposition_trigger=9"), "G = 8 answers"),
    ("method.item_threshold", baseline("rrd", "method.item_threshold=0"), "all rewards are equal"),
    (
        "method.item_threshold",
        baseline("rar", "method.item_threshold=0", "method.aggregation=explicit"),
        "all rewards are equal",
    ),
    ("eval.at_steps", baseline("scalar-rm", "eval.at_steps=[32,33]"), "ends with step 32"),
    (
        "eval.at_steps",
        baseline("prompted-policy", "eval.at_steps=[9]", "run.max_steps=8"),
        "ends with step 8",
    ),
]

CASES: list[tuple[str, list[str], str]] = [
    ("method.trqc.q_target", [*COARSE, "method.trqc.q_target=0.245"], "winds sigma_rt down"),
    ("method.routing.d_tri", [*SANE, "method.routing.d_tri=0.1"], "1/8"),
    ("method.routing.tau_tie", [*SANE, "method.routing.tau_tie=0.97"], "27/28 = 0.964"),
    ("method.routing.tau_tie", [*SANE, "method.routing.tau_tie=0.70", "method.trqc.eta_tau=1e-6"], "20/28"),
    (  # 0.53 lies 0.0057 below 15/28; at q* = 0.7 a step upward is 3/7 of eta_tau at most
        "method.routing.tau_tie",
        ["method.routing.tau_tie=0.53", "method.trqc.q_target=0.7", "method.trqc.eta_tau=1e-5"],
        "15/28",
    ),
    ("method.routing.tau_tie", [*SANE, "method.routing.tau_tie=0"], "every tie rate is at least 0"),
    ("method.routing.sigma_rt", [*SANE, "method.routing.sigma_rt=0.5"], "every group is quarantined"),
    ("method.phase.rubric_target", [*SANE, "method.phase.rubric_target=5"], "2 W = 10"),
    ("method.phase.max_rubric_steps", [*SANE, "method.phase.max_rubric_steps=11"], "M* = 12"),
    ("method.phase.tau_sat", [*SANE, "method.phase.tau_sat=0.93"], "reaches 0.928"),
    (
        "method.phase.tau_sat",
        [*SANE, "method.phase.tau_sat=0", "method.phase.tau_sat_range=[0,0.95]"],
        "ends after one step",
    ),
    ("method.pool.min_pool", [*SANE, "method.pool.min_pool=1601"], "1600 entries"),
    (
        "method.pool.min_pool",
        [*SANE, "method.pool.min_pool=301", "run.policy_updates=75", "method.prompts_per_step=4"],
        "300 entries at most, so no rubric phase",
    ),
    ("method.routing.mode", [*SANE, "method.routing.mode=off"], "no rubric phase ever starts"),
    ("method.phase.policy_target", [*SANE, "run.policy_updates=20"], "20 policy updates"),
    (
        "method.phase.policy_window",
        [*SANE, "run.policy_updates=70", "method.phase.rubric_window=2"],
        "beyond the run's 70",
    ),
    ("method.phase.rubric_window", [*SANE, "method.phase.rubric_window=21"], "beyond the run's 500"),
    ("method.phase.policy_target", [*SANE, "run.max_steps=24"], "24 policy updates"),
    (
        "run.max_steps",
        [*SANE, "method.phase.policy_target=3", "method.phase.alpha=0.5", "run.max_steps=11"],
        "2 W = 10",
    ),
    ("method.phase.fixed", [*SANE, FIXED, "run.policy_updates=50"], "50 policy steps at most"),
    ("method.phase.fixed", [*SANE, FIXED, "run.max_steps=100"], "ends the run in its first rubric phase"),
    ("method.phase.fixed", [*SANE, FIXED, "run.policy_updates=1", STILL], "no rubric is updated"),
    ("method.phase.fixed", [*SANE, FIXED, "run.max_steps=2", STILL], "2 policy steps at most"),
    (
        "method.phase.policy_target",
        [*SANE, RANDOM, "run.policy_updates=25"],
        "25 steps on average, the run 25",
    ),
    ("method.phase.policy_target", [*SANE, RANDOM, "run.policy_updates=1", STILL], "no rubric is likely"),
    # 500 policy steps in phases of 50, nine rubric phases of 50 between them: 950.
    ("probe.at_steps", [*SANE, FIXED, "probe.at_steps=[start,950,951]"], "ends with step 950"),
    ("eval.at_steps", [*SANE, FIXED, "eval.at_steps=[951]"], "ends with step 950"),
    ("probe.at_steps", [*SANE, "run.max_steps=90", "probe.at_steps=[start,90,91]"], "ends with step 90"),
    ("eval.at_steps", [*SANE, RANDOM, "run.max_steps=90", "eval.at_steps=[91]"], "ends with step 90"),
    (
        "method.phase.tau_imp",  # c = 1: rewards of -1 after rewards of 1 are a change of -2
        [*SANE, "method.phase.tau_imp=-2.1", "method.phase.tau_imp_range=[-3,0.05]"],
        "never below -2",
    ),
    (
        "method.phase.tau_imp",
        [
            *SANE,
            "method.phase.tau_imp=-2.1",
            "method.phase.tau_imp_range=[-3,-2.05]",
            "method.phase.eta_rubric=0",
        ],
        "nor at any value of tau_imp_range",
    ),
    ("method.entries_per_rubric_step", [*SANE, "method.entries_per_rubric_step=2049"], "2048 entries"),
    ("method.trqc.eta_sigma", [*SANE, "method.trqc.eta_sigma=0.3"], "whole range"),
    ("method.trqc.eta_tau", [*SANE, "method.trqc.eta_tau=0.6"], "whole range"),
    ("method.phase.eta_policy", [*SANE, "method.phase.eta_policy=0.9"], "whole range 0.9"),
    ("method.phase.eta_rubric", [*SANE, "method.phase.tau_imp_range=[0.005,0.005]"], "no room"),
]


@pytest.mark.parametrize(
    ("key", "overrides", "part"),
    [*CASES, *BASELINE_CASES],
    ids=[f"{key}-{i}" for i, (key, _, _) in enumerate([*CASES, *BASELINE_CASES])],
)
def test_each_rule_fires_and_its_advice_silences_it(key: str, overrides: list[str], part: str) -> None:
    found = reachability(compose(overrides).config)
    assert [finding.key for finding in found] == [key]
    assert part in found[0].reason
    assert findings(*overrides, found[0].works) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        [*COARSE, "method.trqc.q_target=0.25"],  # just above the floor of 0.245
        [*SANE, "method.trqc.q_target=0.2"],  # the likelihood judge gives no two equal scores
        [*COARSE, "method.trqc.q_target=0.2", "method.trqc.eta_sigma=0", "method.trqc.eta_tau=0"],  # static
        [*SANE, "method.routing.d_tri=0.125"],
        [*SANE, "method.routing.tau_tie=0.9642"],
        [*SANE, "method.routing.tau_tie=0.7", "method.trqc.eta_tau=1e-6", "method.routing.mode=sigma_zero"],
        [*SANE, "method.routing.tau_tie=0.7", "method.trqc.eta_tau=0"],
        [*SANE, "method.routing.sigma_rt=0.49"],
        [*SANE, "method.phase.rubric_target=10"],
        [*SANE, "method.phase.rubric_target=5", "method.phase.eta_rubric=0"],
        [*SANE, "method.phase.rubric_target=5", "method.phase.mode=fixed"],
        [*SANE, "method.phase.tau_sat=0.92"],
        [*SANE, "method.pool.min_pool=1600"],
        [*SANE, "method.routing.mode=off", "method.pool.fill=uniform"],
        [*SANE, "run.policy_updates=75"],
        [*SANE, "run.max_steps=75"],
        [*SANE, FIXED, "run.policy_updates=51"],
        [*SANE, FIXED, "run.max_steps=101"],
        [*SANE, FIXED, "probe.at_steps=[950]", "eval.at_steps=[1,950]"],
        [*SANE, RANDOM, "run.policy_updates=26"],
        [*SANE, "method.phase.tau_imp=-2", "method.phase.tau_imp_range=[-3,0.05]"],
        [
            *SANE,
            "method.phase.tau_imp=-3",
            "method.phase.tau_imp_range=[-3,0]",
            "method.phase.plateau_signal=gain",
        ],
        [*SANE, "method.entries_per_rubric_step=2048"],
        [*SANE, "eval.at_steps=[5000]"],  # how many rubric steps there will be is not known
        baseline("evolm", "run.policy_updates=4"),
        baseline("evolm", "run.max_steps=7", "probe.at_steps=[7]"),
        baseline("evolm", "method.buffer.min_age=31"),
        baseline("rlcer", "method.outcome_weight=0"),
        baseline("rlcer", "data=file", "data.path=prompts.jsonl", "data.check_field=rule"),
        baseline("rubric-arm", "run.max_steps=5"),
        baseline("rrd", "method.decomposition_trigger=8"),
        baseline("rar", "method.item_threshold=0"),
    ],
    ids=lambda overrides: " ".join(overrides[1:]),
)
def test_each_rule_is_silent_where_the_target_can_be_reached(overrides: list[str]) -> None:
    assert findings(*overrides) == {}


def test_errors_come_first_and_every_line_is_complete() -> None:
    found = reachability(compose(["preset=paper", "method.routing.sigma_rt=0.6"]).config)
    assert [finding.severity for finding in found] == ["error", "warning", "warning"]
    for finding in found:
        assert finding.line().startswith(f"{finding.severity}: {finding.key}={finding.value}: ")
        assert finding.line().endswith(f"works: {finding.works}")
        assert set(finding.as_dict()) == {"severity", "key", "value", "reason", "works"}


def test_the_floor_is_the_printed_share() -> None:
    """RACE Table 13: 24.5 % of the policy rollout groups have sigma = 0."""
    assert COLLAPSE_FLOOR == 0.245


def test_two_samples_a_group_have_no_tie_rate_between_0_and_1() -> None:
    found = findings(*SANE, "method.group_size=2", "method.routing.d_tri=0.6")
    assert "0/1" in found["method.routing.tau_tie"]

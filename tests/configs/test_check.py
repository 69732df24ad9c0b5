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

SANE = ["preset=sane"]
COARSE = ["preset=sane", "judge=qwen3-1.7b"]


def findings(*overrides: str) -> dict[str, str]:
    """Key -> reason."""
    return {finding.key: finding.reason for finding in reachability(compose(overrides).config)}


def test_the_embedded_and_the_sane_preset_can_reach_all_their_targets() -> None:
    assert findings("preset=embedded") == {}
    assert findings("preset=sane") == {}


def test_the_paper_preset_warns_of_the_quarantine_target_and_of_the_trigram_floor() -> None:
    found = findings("preset=paper")
    assert set(found) == {"method.trqc.q_target", "method.routing.d_tri"}
    assert "24.5%" in found["method.trqc.q_target"]
    assert "1/8 = 0.125" in found["method.routing.d_tri"]


CASES: list[tuple[str, list[str], str]] = [
    ("method.trqc.q_target", [*COARSE, "method.trqc.q_target=0.245"], "winds sigma_rt down"),
    ("method.routing.d_tri", [*SANE, "method.routing.d_tri=0.1"], "1/8"),
    ("method.routing.tau_tie", [*SANE, "method.routing.tau_tie=0.97"], "27/28 = 0.964"),
    ("method.routing.tau_tie", [*SANE, "method.routing.tau_tie=0.70", "method.trqc.eta_tau=1e-6"], "20/28"),
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
    ("method.phase.policy_window", [*SANE, "run.policy_updates=70"], "beyond the run's 70"),
    ("method.trqc.eta_sigma", [*SANE, "method.trqc.eta_sigma=0.3"], "whole range"),
    ("method.trqc.eta_tau", [*SANE, "method.trqc.eta_tau=0.6"], "whole range"),
    ("method.phase.eta_policy", [*SANE, "method.phase.eta_policy=0.9"], "whole range 0.9"),
    ("method.phase.eta_rubric", [*SANE, "method.phase.tau_imp_range=[0.005,0.005]"], "no room"),
]


@pytest.mark.parametrize(
    ("key", "overrides", "part"), CASES, ids=[f"{key}-{i}" for i, (key, _, _) in enumerate(CASES)]
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

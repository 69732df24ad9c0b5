"""The cost ledger: measured calls beside what was printed and what followed from the step."""

from __future__ import annotations

import pytest

from racelab.experiments.methods.ledger import KINDS, add, ledger
from racelab.experiments.methods.race.costs import printed_policy, printed_rubric


def test_race_at_the_size_of_table_15() -> None:
    """(N, G) = (64, 8). Policy: 64 * 8 = 512, 64, 512, 512. Rubric: 0, 512, 2 * 512 = 1,024, 512."""
    assert printed_policy(64, 8) == {
        "policy_gen": 512,
        "rubric_gen": 64,
        "judge_eval": 512,
        "learner_samples": 512,
    }
    assert printed_rubric(64, 8) == {
        "policy_gen": 0,
        "rubric_gen": 512,
        "judge_eval": 1024,
        "learner_samples": 512,
    }


def test_add_sums_kind_by_kind_and_a_kind_that_is_missing_counts_nothing() -> None:
    """1 + 4 + 0, 2 + 0 + 0, 0 + 0 + 7."""
    found = add({"policy_gen": 1, "rubric_gen": 2}, {"policy_gen": 4}, {"judge_eval": 7})
    assert found == {"policy_gen": 5, "rubric_gen": 2, "judge_eval": 7}
    assert add() == {}


def test_only_a_difference_from_the_expected_is_a_mismatch() -> None:
    """Two of three kinds differ from what was expected; all three differ from what is printed."""
    found = ledger(
        {"policy_gen": 8, "judge_eval": 6, "rubric_gen": 1},
        {"policy_gen": 8, "judge_eval": 4, "rubric_gen": 2},
        {"policy_gen": 16, "judge_eval": 16, "rubric_gen": 3},
    )
    assert found == {
        "cost/calls/policy_gen": 8.0,
        "cost/calls/judge_eval": 6.0,
        "cost/calls/rubric_gen": 1.0,
        "cost/calls/policy_gen_expected": 8.0,
        "cost/calls/judge_eval_expected": 4.0,
        "cost/calls/rubric_gen_expected": 2.0,
        "cost/calls/policy_gen_printed": 16.0,
        "cost/calls/judge_eval_printed": 16.0,
        "cost/calls/rubric_gen_printed": 3.0,
        "health/cost_mismatch": 2.0,
    }
    assert all(isinstance(value, float) for value in found.values())


def test_savings_are_no_mismatch_and_printed_formulas_may_lack_a_kind() -> None:
    found = ledger({"external_calls": 3}, {"external_calls": 3}, {})
    assert found["health/cost_mismatch"] == 0.0
    assert "cost/calls/external_calls_printed" not in found


@pytest.mark.parametrize(
    ("measured", "expected", "printed", "named"),
    [
        ({"judge_eval": 1}, {}, {}, "judge_eval"),
        ({}, {"judge_eval": 1}, {}, "judge_eval"),
        ({"judge_eval": 1}, {"policy_gen": 1}, {}, "'judge_eval', 'policy_gen'"),
        ({"judge": 1}, {"judge": 1}, {}, "judge"),
        ({}, {}, {"judge": 1}, "judge"),
    ],
)
def test_kinds_that_do_not_match_are_refused(
    measured: dict[str, int], expected: dict[str, int], printed: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"do not match: .*{named}"):
        ledger(measured, expected, printed)


def test_kinds() -> None:
    assert KINDS == ("policy_gen", "rubric_gen", "judge_eval", "learner_samples", "external_calls")

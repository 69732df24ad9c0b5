"""The diagnostics of RLDS §5.1 and §5.3 and their permutation null. Expected numbers worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods.rlds import diagnostics as diag
from racelab.experiments.methods.rlds.rows import Rows, complete
from racelab.experiments.methods.rlds.sdae import Settings, token_advantages, turn_advantages

from .rlds_rows import FROZENLAKE_PHI, random_rows

FEW = settings(max_examples=30, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**6)
SDAE = Settings()
STAGES = {
    "sign_disagreement_rows",
    "sign_disagreement_groups",
    "subtask_std",
    "grpo_correlation",
    "grpo_correlation_raw",
    "token_adv_std",
}


def rows_of(rewards, grades, group=None, phi=None, turns=1, **rest):
    n, k = np.shape(grades)
    return Rows(
        rewards_N=np.array(rewards, dtype=float),
        group_N=np.array(group or [0] * n),
        counts_NU=np.ones((n, turns)),
        phi_K=np.full(k, 1 / k) if phi is None else np.array(phi),
        grades_NK=np.array(grades),
        **{name: np.array(value) for name, value in rest.items()},
    )


# ---------------------------------------------------------------- stage metrics


def test_stage_metrics_golden():
    """Group 0: R = (1, 1), grades (5, 1), (1, 5): r = (1, 0), (0, 1); A = +-(1/2, -1/2): both rows disagree.

    Group 1: R = (1, 0), grades (3, 3): r = (1/2, 1/2), (0, 0); A = +-(1/4, 1/4): none does.
    Within-group std: 1/2 on both subtasks, and 1/4. phi = (3/4, 1/4): A_i = (1/4, -1/4, 1/4, -1/4).
    R - mean = (0, 0, 1/2, -1/2): correlation (1/4) / (sqrt(4/16) sqrt(1/2)) = 1/sqrt(2); GRPO (0, 0, 1, -1): the same.
    """
    rows = rows_of([1, 1, 1, 0], [[5, 1], [1, 5], [3, 3], [3, 3]], [0, 0, 1, 1], phi=[0.75, 0.25])
    out = diag.stage_metrics([rows], SDAE)
    assert out == {
        "stage1/sign_disagreement_rows": 0.5,
        "stage1/sign_disagreement_groups": 0.5,
        "stage1/subtask_std": pytest.approx(0.375),
        "stage1/flat_group_frac": 0.5,
        "stage2/grpo_correlation": pytest.approx(math.sqrt(0.5)),
        "stage2/grpo_correlation_raw": pytest.approx(math.sqrt(0.5)),
        "stage2/informative": 1.0,
    }


def test_token_adv_std_golden():
    """K = 1, R = (1, 0), two turns of one token; row 0 has pivot 0: m = 1 +- a with a = (1 - e^-1/2)/(1 + e^-1/2).

    Â_0 = 1 (eps 0): its token std is a = 0.2449187. Row 1 has no pivot and does not count.
    """
    rows = rows_of([1, 0], [[3], [3]], turns=2, pivots_NK=[[0], [-1]])
    out = diag.stage_metrics([rows], Settings(eps=0.0))
    assert out["stage3/token_adv_std"] == pytest.approx(0.2449187, abs=1e-7)
    both = diag.stage_metrics([replace(rows, pivots_NK=np.array([[0], [1]]))], Settings(eps=0.0))
    assert both["stage3/token_adv_std"] == pytest.approx(0.2449187, abs=1e-7)
    plain = diag.stage_metrics([rows], Settings(kernel="none"))
    assert plain["stage3/token_adv_std"] == pytest.approx(0.0, abs=1e-12)
    assert "stage3/token_adv_std" not in diag.stage_metrics([replace(rows, pivots_NK=None)], SDAE)


def test_token_std_counts_tokens():
    """Values (1, 4) on (2, 1) tokens: mean 2, variance (1 + 1 + 4)/3 = 2. No tokens: 0."""
    adv_NU, tokens_NU = np.array([[1.0, 4.0], [1.0, 4.0]]), np.array([[2.0, 1.0], [0.0, 0.0]])
    assert diag.token_std(adv_NU, tokens_NU).tolist() == pytest.approx([math.sqrt(2), 0.0])
    assert diag.token_std(np.array([[1.0, 4.0]]), np.array([[0.0, 1.0]])).tolist() == [0.0]


@FEW
@given(SEEDS)
def test_token_adv_std_is_that_of_the_tokens(seed):
    rows, turns_NT = random_rows(np.random.default_rng(seed))
    (out,) = token_advantages([rows], [turns_NT], SDAE)
    trained_NT = (turns_NT >= 0) & (turns_NT >= rows.train_from_N[:, None])
    stds = [
        out.adv_NT[i, trained_NT[i]].std()
        for i in range(12)
        if (rows.pivots_NK[i] >= 0).any() and trained_NT[i].any()
    ]
    assert diag.stage_metrics([rows], SDAE)["stage3/token_adv_std"] == pytest.approx(np.mean(stds))


def test_masked_tokens_do_not_count():
    """A retry with one trained turn left has one value there: std 0, though its masked zeros differ from it."""
    rows = rows_of(
        [1, 0], [[3], [3]], turns=2, pivots_NK=[[0], [0]], train_from_N=[1, 1], is_retry_N=[True, True]
    )
    (out,) = turn_advantages([rows], SDAE)
    assert out.adv_NU[0].std() > 0.3
    assert diag.stage_metrics([rows], SDAE)["stage3/token_adv_std"] == 0.0
    gone = replace(rows, train_from_N=np.array([2, 2]))
    assert "stage3/token_adv_std" not in diag.stage_metrics([gone], SDAE)


def test_pivot_spread_golden():
    """Pivots (0, 2, none) spread 1, (9 -> 3, 1, 3): std of (3, 1, 3) = sqrt(8/9); one pivot alone has no spread."""
    rows = rows_of(
        [1, 0, 0, 0], [[3] * 3] * 4, turns=4, pivots_NK=[[0, 2, -1], [9, 1, 3], [1, -1, -1], [0, 3, 3]],
        graded_N=[True, True, True, False],
    )  # fmt: skip
    assert diag.stage_metrics([rows], SDAE)["stage3/pivot_spread"] == pytest.approx(
        (1 + math.sqrt(8 / 9)) / 2
    )


def test_the_within_group_std_is_taken_around_the_mean_of_the_group():
    """With the baseline of the originals A = (-1/2, 1/2, 1/2): around their mean 1/6 the std is sqrt(2/9)."""
    rows = rows_of([0, 1, 1], [[3]] * 3, is_retry_N=[False, False, True])
    out = diag.stage_metrics([rows], Settings(opmd_baseline=True))
    assert out["stage1/subtask_std"] == pytest.approx(math.sqrt(2 / 9))


def test_what_has_no_value_is_left_out():
    """Equal rewards and grades: no correlation; ungraded: no stage at all, but the flat groups."""
    flat = rows_of([1, 1], [[3, 3], [3, 3]])
    assert diag.stage_metrics([flat], SDAE) == {
        "stage1/sign_disagreement_rows": 0.0,
        "stage1/sign_disagreement_groups": 0.0,
        "stage1/subtask_std": 0.0,
        "stage1/flat_group_frac": 1.0,
        "stage2/informative": 0.0,
    }
    blind = replace(rows_of([1, 0], [[3, 3], [3, 3]]), grades_NK=None)
    assert diag.stage_metrics([blind], SDAE) == {"stage1/flat_group_frac": 0.0, "stage2/informative": 0.0}
    assert diag.null([blind], SDAE, 3, np.random.default_rng(0)) == {}


def test_groups_that_fell_back_do_not_count():
    """Group 1 has no grades: rows, groups and correlation are those of group 0 alone."""
    graded = [True, True, True, False, False]
    grades = [[5, 1], [1, 5], [3, 3], [0, 0], [0, 0]]
    rows = rows_of([1, 1, 0, 1, 0], grades, [0, 0, 0, 1, 1], phi=[0.75, 0.25], graded_N=graded)
    alone = rows_of([1, 1, 0], grades[:3], phi=[0.75, 0.25])
    both, one = diag.stage_metrics([rows], SDAE), diag.stage_metrics([alone], SDAE)
    assert {**both, "stage1/flat_group_frac": 0.0} == pytest.approx(one)
    assert both["stage1/sign_disagreement_groups"] == 1.0


def test_tasks_are_pooled():
    """Two tasks of K = 2 and 1, one group each: half of the groups and 2 of 5 rows disagree; one phi is informative."""
    a = rows_of([1, 1], [[5, 1], [1, 5]], phi=[0.75, 0.25], turns=2, pivots_NK=[[0, 1], [0, 1]])
    b = rows_of([1, 0, 0], [[3], [3], [3]], turns=3, pivots_NK=[[0], [-1], [-1]])
    out = diag.stage_metrics([a, b], SDAE)
    assert out["stage1/sign_disagreement_rows"] == 0.4
    assert out["stage1/sign_disagreement_groups"] == out["stage1/flat_group_frac"] == 0.5
    assert out["stage1/subtask_std"] == pytest.approx((0.5 + math.sqrt(2 / 9)) / 2)
    assert out["stage2/informative"] == 1.0
    advantages = turn_advantages([a, b], SDAE)
    ours_N = np.concatenate([x.adv_N for x in advantages])
    assert out["stage2/grpo_correlation_raw"] == pytest.approx(
        np.corrcoef(ours_N, [0, 0, 2 / 3, -1 / 3, -1 / 3])[0, 1]
    )
    assert out["stage3/pivot_spread"] == 0.5
    stds = [advantages[0].adv_NU[0].std(), advantages[0].adv_NU[1].std(), advantages[1].adv_NU[0].std()]
    assert out["stage3/token_adv_std"] == pytest.approx(np.mean(stds))
    assert "token_adv_std_p" in diag.null([a, b], SDAE, 2, np.random.default_rng(0))


def test_the_condition_and_amplification_change_nothing():
    rows, _ = random_rows(np.random.default_rng(1))
    trained = Settings(advantage="grpo", positive_amplification=3.0)
    assert diag.stage_metrics([rows], trained) == diag.stage_metrics([rows], SDAE)
    first, second = (diag.null([rows], s, 3, np.random.default_rng(0)) for s in (trained, SDAE))
    assert first == second


@pytest.mark.parametrize("threshold", [0.9e-9, 1.1e-9])
def test_the_threshold_of_a_sign(threshold):
    assert (
        diag.mixed_signs(np.array([[1.0, -threshold], [threshold, -1.0]])).tolist() == [threshold > 1e-9] * 2
    )
    assert diag.mixed_signs(np.array([[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0]])).tolist() == [False] * 3


def test_pearson():
    """x = (1, 2, 3), y = (1, 3, 2): centred product 1, norms sqrt(2) each: 1/2."""
    x = np.array([1.0, 2.0, 3.0])
    assert diag.pearson(x, np.array([1.0, 3.0, 2.0])) == pytest.approx(0.5)
    assert diag.pearson(x, -7 * x + 3) == pytest.approx(-1.0)
    assert diag.pearson(x, np.full(3, 0.1)) is None
    assert diag.pearson(np.full(3, 0.1), x) is None
    assert diag.pearson(1e-10 * x, x) is None
    assert diag.pearson(np.zeros(0), np.zeros(0)) is None


# ---------------------------------------------------------------- uniform phi


@FEW
@given(SEEDS)
def test_uniform_phi_is_flagged_not_informative(seed):
    """A_i = (R_i - mean) / K whatever the grades say: raw correlation 1, in every permutation, p = 1."""
    rng = np.random.default_rng(seed)
    rows, _ = random_rows(rng, k=4, phi_K=np.full(4, 0.25))
    out = diag.stage_metrics([rows], SDAE)
    assert out["stage2/informative"] == 0.0
    assert out["stage2/grpo_correlation_raw"] == pytest.approx(1.0)
    (adv,) = turn_advantages([rows], Settings(eps=0.0, kernel="none"))
    centred_N = rows.rewards_N - np.repeat(rows.rewards_N.reshape(3, 4).mean(1), 4)
    np.testing.assert_allclose(adv.adv_N * adv.sigma, centred_N / 4, atol=1e-12)
    null = diag.null([rows], SDAE, 5, rng)
    for name in ("grpo_correlation", "grpo_correlation_raw"):
        assert null[f"{name}_p"] == 1.0
        assert null[f"{name}_excess"] == pytest.approx(0.0, abs=1e-12)


def test_informative_weights():
    assert diag.correlation_informative(FROZENLAKE_PHI)
    assert not diag.correlation_informative(np.array([1.0]))
    assert not diag.correlation_informative(np.full(3, 1 / 3) + np.array([0, 5e-10, -4e-10]))


# ---------------------------------------------------------------- per-subtask readouts


def test_subtask_metrics_golden():
    """Rows 0, 1 originals, 2 a retry of 0, 3 of 1. Row 1 is ungraded: its pair does not count.

    Grades a: 1, 5, 3 -> 3; b: 2, 4, 2 -> 8/3. Pivots a: 0, none, 7 -> 1 (last turn); b: none everywhere.
    Deltas of row 2 over row 0: a 5 - 1 = 4, b 4 - 2 = 2.
    """
    rows = rows_of(
        [0, 0, 1, 1], [[1, 2], [0, 0], [5, 4], [3, 2]], turns=2,
        pivots_NK=[[0, -1], [1, 1], [-1, -1], [7, -1]], graded_N=[True, False, True, True],
    )  # fmt: skip
    out = diag.subtask_metrics(rows, ["a", "b"], np.array([-1, -1, 0, 1]))
    assert out == {
        "grade/a": 3.0,
        "grade/b": pytest.approx(8 / 3),
        "pivot/a": 0.5,
        "retry/a": 4.0,
        "retry/b": 2.0,
    }
    assert set(diag.subtask_metrics(rows, ["a", "b"])) == {"grade/a", "grade/b", "pivot/a"}
    assert diag.retry_deltas(rows, np.array([-1, -1, 0, 1])).tolist() == [[4.0, 2.0]]
    assert diag.retry_deltas(rows, None).shape == (0, 2)
    swapped = replace(rows, graded_N=np.array([True, True, False, True]), grades_NK=rows.grades_NK + 1)
    assert diag.retry_deltas(swapped, None).shape == (0, 2)
    assert diag.retry_deltas(swapped, np.array([-1, -1, 0, 1])).tolist() == [[3.0, 2.0]]


# ---------------------------------------------------------------- permutation null


def kolmogorov(p, draws):
    """Largest distance of the distribution of p from the uniform one on {1, ..., B + 1} / (B + 1)."""
    grid = np.arange(1, draws + 2) / (draws + 1)
    return float(np.abs((np.array(p)[None, :] <= grid[:, None] + 1e-12).mean(1) - grid).max())


@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "lengths differ"])
def test_random_grades_give_uniform_p(equal):
    """Kolmogorov-Smirnov at the 0.1 % level, 1.95 / sqrt(n), for the metrics that have no ties."""
    seeds, draws, found = 80, 9, []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        rows, _ = random_rows(rng, 4, 5, equal=equal, phi_K=np.array([0.6, 0.3, 0.1]), train_from_N=None)
        found.append(diag.null([rows], SDAE, draws, rng))
    for name in ("token_adv_std", "grpo_correlation", "subtask_std"):
        assert kolmogorov([f[f"{name}_p"] for f in found], draws) < 1.95 / math.sqrt(seeds), name


def planted(rng, groups=12, size=6):
    """Grades and pivots that depend on the reward.

    R = 1: grades (3, 3, 3), shares (1/3, 1/3, 1/3), pivots all at turn 0. R = 1/2: (2, 3, 5), shares
    (1/14, 1/7, 2/7), pivots 1, 2, 3. Good rows are above, bad ones below the mean on every subtask: no sign disagrees.
    """
    good_N1 = (np.arange(groups * size) % size < size // 3)[:, None]
    return random_rows(
        rng,
        groups,
        size,
        equal=True,
        rewards=np.where(good_N1[:, 0], 1.0, 0.5),
        grades_NK=np.where(good_N1, [[3, 3, 3]], [[2, 3, 5]]),
        pivots_NK=np.where(good_N1, [[0, 0, 0]], [[1, 2, 3]]),
        phi_K=np.array([0.6, 0.3, 0.1]),
        train_from_N=None,
    )[0]


def test_planted_structure_is_found():
    """Also where it makes rows disagree less than permuted ones do, as a good grader can."""
    rng = np.random.default_rng(0)
    out = diag.null([planted(rng)], SDAE, 149, rng)
    assert set(out) == {f"{name}_{part}" for name in STAGES for part in ("excess", "p")}
    assert [name for name in STAGES if out[f"{name}_p"] >= 0.01] == []
    assert out["sign_disagreement_rows_excess"] < 0
    assert out["token_adv_std_excess"] > 0


def test_random_grades_disagree_too():
    """The raw rate is no evidence: more than nine solved rows in ten disagree under random grades."""
    rng = np.random.default_rng(2)
    rows, _ = random_rows(rng, groups=10, size=6, k=5, rewards=np.ones(60))
    assert diag.stage_metrics([rows], SDAE)["stage1/sign_disagreement_rows"] > 0.9
    assert diag.null([rows], SDAE, 19, rng)["sign_disagreement_rows_p"] > 0.05


@FEW
@given(SEEDS)
def test_a_permutation_stays_in_its_group_and_leaves_ungraded_rows_alone(seed):
    rng = np.random.default_rng(seed)
    rows, _ = random_rows(rng, graded_N=rng.random(12) < 0.7)
    rows = complete(rows)
    moved = diag.permuted(rows, diag._positions(rows, rng), rng)
    for group in (5, 6, 7):
        there_N = (rows.group_N == group) & rows.graded_N
        assert sorted(moved.grades_NK[there_N].tolist()) == sorted(rows.grades_NK[there_N].tolist())
        none = [sorted((r.pivots_NK[there_N] < 0).sum(1).tolist()) for r in (rows, moved)]
        assert none[0] == none[1]
    off_N = ~rows.graded_N
    assert moved.grades_NK[off_N].tolist() == rows.grades_NK[off_N].tolist()
    assert (moved.pivots_NK <= (rows.counts_NU.cumsum(1).argmax(1))[:, None]).all()
    assert moved.pivots_NK.dtype == rows.pivots_NK.dtype
    assert moved.rewards_N is rows.rewards_N


def test_grades_and_pivots_travel_together():
    """Rows of equal length: each (grade, pivot) vector is one of those that were there, turn for turn."""
    rng = np.random.default_rng(0)
    rows, _ = random_rows(rng, groups=20, size=4, equal=True)
    rows = complete(rows)
    moved = diag.permuted(rows, diag._positions(rows, rng), rng)
    seen = [np.column_stack([r.group_N, r.grades_NK, r.pivots_NK]).tolist() for r in (rows, moved)]
    assert sorted(seen[0]) == sorted(seen[1])
    assert seen[0] != seen[1]


def test_a_pivot_travels_as_a_position():
    """Pivot 1 of 2 turns with u = 1/2 stands at 3/4; in a row of 8 turns that is turn 6. The row of 8 had none."""
    counts_NU = np.array([[1.0, 1] + [0.0] * 6, [1.0] * 8])
    rows = complete(replace(rows_of([1, 0], [[3], [4]], pivots_NK=[[1], [-1]]), counts_NU=counts_NU))
    at_NK = np.array([[0.75], [0.0]])
    swapped = [diag.permuted(rows, at_NK, np.random.default_rng(s)).pivots_NK.tolist() for s in range(9)]
    assert [[-1], [6]] in swapped
    assert [[1], [-1]] in swapped
    positions = diag._positions(rows, np.random.default_rng(0))
    assert 0.5 <= positions[0, 0] < 1.0


def test_p_and_excess_golden():
    """Observed 0.5, drawn 0.1, 0.2, 0.6, 0.5: pooled mean 0.38, distances 0.12 | 0.28, 0.18, 0.22, 0.12: p = 5/5.

    Observed 0.9 against the same: mean 0.46, distances 0.44 | 0.36, 0.26, 0.14, 0.04: p = 1/5; excess 0.9 - 0.35.
    """
    drawn = [{"s/x": v, "s/y": None, "s/z": v} for v in (0.1, 0.2, 0.6, 0.5)]
    drawn[1]["s/z"] = None
    out = diag._compare({"s/x": 0.5, "s/y": 0.5, "s/z": 0.5}, drawn)
    assert out == {"x_excess": pytest.approx(0.15), "x_p": 1.0}
    out = diag._compare({"s/x": 0.9, "s/y": None, "s/z": None}, drawn)
    assert out == {"x_excess": pytest.approx(0.55), "x_p": 0.2}
    assert diag._compare({"s/x": 0.9}, []) == {}


def test_the_null_is_a_function_of_its_generator():
    rows, _ = random_rows(np.random.default_rng(4))
    a, b, c = (diag.null([rows], SDAE, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert a == b != c


def test_pivots_beyond_the_row_are_clamped_before_they_travel():
    rows, _ = random_rows(np.random.default_rng(4), equal=True)
    beyond = replace(rows, pivots_NK=np.where(rows.pivots_NK == 4, 44, rows.pivots_NK))
    a, b = (diag.null([r], SDAE, 5, np.random.default_rng(1)) for r in (rows, beyond))
    assert a == b

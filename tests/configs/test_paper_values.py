"""The `paper` preset against the numbers that the RACE paper prints, and the choices where it prints none."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from racelab.configs.compose import compose
from racelab.configs.schema import Config

TABLE = Path(__file__).parents[2] / "analysis" / "paper" / "race_table07_hyperparameters.csv"

TABLE_7_KEYS: dict[str, tuple[str, ...]] = {
    "n_batch": ("method.prompts_per_step",),
    "group_size": ("method.group_size",),
    "max_response_tokens": ("method.response.max_tokens",),
    "gpus": ("backend.gpus",),
    "learner_ranks": ("backend.learner_ranks",),
    "vllm_engines": ("backend.rollout_engines",),
    "tau_tie": ("method.routing.tau_tie",),
    "sigma_rt": ("method.routing.sigma_rt",),
    "d_star": ("method.routing.d_tri", "method.routing.d_emb"),
    "sigma_sw": ("method.phase.sigma_sw",),
    "tau_sat_p": ("method.phase.tau_sat",),
    "plateau_window": ("method.phase.window",),
    "tau_imp_r": ("method.phase.tau_imp",),
    "q_target": ("method.trqc.q_target",),
    "alpha_q": ("method.trqc.alpha_q",),
    "eta": ("method.trqc.eta_sigma", "method.trqc.eta_tau"),
    "policy_phase_target": ("method.phase.policy_target",),
    "rubric_phase_target": ("method.phase.rubric_target",),
    "reward_clip": ("method.rubric_reward.clip",),
    "pool_capacity": ("method.pool.capacity",),
}
"""Row of Table 7 -> the keys that hold it."""

TEXT_VALUES: list[tuple[str, object, str]] = [
    ("learner.lr", 1e-6, "App. B.2: learning rate"),
    ("learner.schedule", "constant", "App. B.2: held constant"),
    ("learner.warmup_steps", 0, "App. B.2: without warm-up"),
    ("learner.kl_beta", 1e-3, "App. B.2: KL coefficient"),
    ("learner.epochs", 1, "App. B.2: one optimization epoch"),
    ("learner.minibatches", 1, "App. B.2: one minibatch per update"),
    ("backend.micro_batch_per_device", 1, "App. B.2: per-device microbatch"),
    ("backend.packed_tokens", 18500, "App. B.2: packed sequences"),
    ("backend.max_lag", 4, "App. B.2: lag of up to four steps"),
    ("backend.truncated_is", 2.0, "App. B.2: importance-sampling cap"),
    ("backend.nodes", 2, "Table 7: 2 nodes"),
    ("backend.gpus_per_node", 8, "Table 7: 8 GPUs a node"),
    ("backend.tensor_parallel", 1, "Table 7: tensor parallelism 1"),
    ("method.entries_per_rubric_step", 64, "App. B.2: N_batch = 64 per update"),
    ("method.response.temperature", 1.0, "App. B.2: actor temperature"),
    ("method.rubric.temperature", 1.0, "App. B.2: actor temperature"),
    ("method.rubric.max_tokens", 16384, "App. B.2: generations"),
    ("data.max_prompt_tokens", 2048, "App. B.2: prompts truncated to"),
    ("data.on_long_prompt", "truncate", "App. B.2: prompts are truncated"),
    ("data.deduplicate", True, "§6.1: after deduplication"),
    ("model.source", "Qwen/Qwen3-8B", "App. B.1"),
    ("judge.source", "Qwen/Qwen3-1.7B", "§6.1, App. B.1"),
    ("run.policy_updates", 500, "§6.1: 500 policy updates"),
    ("method.rubric_reward.eps_norm", 0.05, "§5.2"),
    ("method.phase.fixed", (50, 50), "Table 6: fixed 50/50 alternation"),
]
"""What the text prints beside Table 7."""

OPEN_CHOICES: list[tuple[str, object]] = [
    ("method.rubric_reward.denominator", "sum"),
    ("method.rubric_reward.format_weight", 0.0),
    ("method.trqc.eps_q", 1e-8),
    ("method.rubric.on_parse_failure", "nan"),
    ("method.advantage_eps", 1e-8),
    ("method.loss_normalisation", "informative_groups"),
    ("method.rubric.format", "json"),
    ("method.rubric_reward.invalid_reward", None),
    ("method.routing.mask_uninformative", True),
    ("method.routing.eps_tie", 0.025),
    ("method.routing.d_tri", 0.05),
    ("method.routing.d_emb", 0.05),
    ("encoder.source", "Qwen/Qwen3-Embedding-0.6B"),
    ("encoder.pooling", "last_token"),
    ("method.phase.mu_sat", 0.8),
    ("method.phase.alpha", 0.1),
    ("method.trqc.calibrate_steps", 0),
    ("method.phase.tau_sat_range", (0.05, 0.95)),
    ("method.phase.tau_imp_range", (0.0, 0.05)),
    ("method.trqc.eta_sigma", 0.003),
    ("method.trqc.eta_tau", 0.003),
    ("method.phase.eta_policy", 0.04),
    ("method.phase.eta_rubric", 0.0005),
    ("method.phase.policy_window", 3),
    ("method.phase.rubric_window", 3),
    ("method.phase.rubric_target", 12),
    ("method.trqc.q_target", 0.20),
    ("method.pool.min_pool", 8),
    ("method.pool.capacity", 2048),
    ("method.pool.min_margin", 0.0),
    ("method.phase.plateau_signal", "s_rubric"),
    ("method.phase.max_rubric_steps", None),
    ("run.policy_updates", 500),
    ("judge.temperature", 0.6),
    ("judge.top_p", 0.95),
    ("judge.thinking", True),
    ("learner.clip_ratio", 0.2),
    ("backend.max_lag", 4),
    ("backend.truncated_is", 2.0),
]
"""Where the paper is silent or contradicts itself: the key of the choice, and the paper preset's value."""

SANE_DIFFERS: list[tuple[str, object]] = [
    ("method.routing.d_tri", 0.13125),  # 1.05 / 8
    ("method.pool.min_margin", 0.01),
    ("method.rubric_reward.invalid_reward", -1.0),
    ("method.trqc.q_target", 0.35),
    ("method.phase.max_rubric_steps", 48),  # 4 * 12
]


def value(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


@pytest.fixture(scope="module")
def paper() -> Config:
    return compose(["preset=paper"]).config


def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_transcription_has_every_row_of_table_7() -> None:
    assert len(rows()) == 20
    assert {row["parameter_id"] for row in rows()} == set(TABLE_7_KEYS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["parameter_id"])
def test_each_row_of_table_7_is_what_the_paper_preset_runs(row: dict[str, str], paper: Config) -> None:
    for key in TABLE_7_KEYS[row["parameter_id"]]:
        assert value(paper, key) == float(row["value"]), key


@pytest.mark.parametrize(("key", "printed", "where"), TEXT_VALUES, ids=[key for key, _, _ in TEXT_VALUES])
def test_each_value_of_the_text_is_what_the_paper_preset_runs(
    key: str, printed: object, where: str, paper: Config
) -> None:
    assert value(paper, key) == printed, where


@pytest.mark.parametrize(("key", "chosen"), OPEN_CHOICES, ids=[key for key, _ in OPEN_CHOICES])
def test_each_choice_left_open_by_the_paper_is_a_key(key: str, chosen: object, paper: Config) -> None:
    assert value(paper, key) == chosen


@pytest.mark.parametrize(("key", "chosen"), SANE_DIFFERS, ids=[key for key, _ in SANE_DIFFERS])
def test_the_sane_preset_makes_the_targets_reachable(key: str, chosen: object) -> None:
    assert value(compose(["preset=sane"]).config, key) == chosen


def test_the_512_samples_of_a_step(paper: Config) -> None:
    """App. B.2: 64 prompts with G = 8 yield 512 training samples."""
    assert paper.method.prompts_per_step * paper.method.group_size == 512

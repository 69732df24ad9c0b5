"""What an RLDS step leaves behind: metrics, rows of `rollouts`, `retry_pairs` and `transcripts`. No decisions here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.episodes import Episode
from racelab.experiments.methods.records import known, optim_metrics, reward_metrics
from racelab.experiments.methods.rlds.arrays import Arrays
from racelab.experiments.methods.rlds.batch import REFLECT, RETRY, RetryPairs
from racelab.experiments.methods.rlds.diagnostics import subtask_metrics, token_std
from racelab.experiments.methods.rlds.phi import DynamicPhi
from racelab.experiments.methods.rlds.rollout import Rollout, Row, wanted_retries
from racelab.experiments.methods.rlds.sdae import Advantages
from racelab.experiments.methods.rlds.turns import kept_turns
from racelab.experiments.ports import Task
from racelab.experiments.types import StepRecord, UpdateStats

TableRow = dict[str, object]
_WRITERS = ("policy", "form")
"""Graders and reflectors that are the trained model; the others call nobody."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything of a step that is worth remembering.

    Attributes:
        run: the config.
        task: for names, and its counters.
        rollout: what was played.
        arrays: the same as arrays.
        adv: what SDAE or GRPO made of it.
        kept: the pairs of L_aux.
        phi: the subtask weights of this step.
    """

    run: RldsRunConfig
    task: Task
    rollout: Rollout
    arrays: Arrays
    adv: Advantages
    kept: RetryPairs
    phi: DynamicPhi


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of a step, diagnostics not included.

    Attributes:
        seconds: by part; `step_s` is all of it.
        cpu_s: of this process.
    """

    seconds: Mapping[str, float]
    cpu_s: float


def record(
    seen: Seen, *, step: int, stats: UpdateStats, diagnosed: Mapping[str, float], spent: Spent
) -> StepRecord:
    """Metrics, tables and the terminal's line of one step."""
    originals = [row.episode.reward for row in seen.rollout.rows if not row.episode.is_retry]
    rewards = reward_metrics("train/reward", np.array(originals, dtype=np.float64))
    metrics = {
        "train/clock/policy_step": float(step),
        "train/clock/phase_kind": 0.0,
        **rewards,
        **optim_metrics(stats),
        **{f"train/optim/loss_aux_{part}": v for part, v in stats.losses.items()},
        **{f"rlds/{name}": value for name, value in diagnosed.items()},
        **_subtasks(seen),
        **_reflect_metrics(seen),
        **_fallbacks(seen),
        **_task_metrics(seen),
        **_cost_metrics(seen, stats),
        **_perf_metrics(seen, spent),
    }
    tables = {
        "rollouts": _rollout_rows(seen, step),
        "retry_pairs": _pair_rows(seen, step),
    }
    texts = step % seen.run.run.transcripts_every == 0
    tables["reflections"] = _reflection_rows(seen, step, texts)
    if texts:
        tables["transcripts"] = _transcript_rows(seen, step)
    status = {
        "phase": "policy",
        "policy_step": step,
        "policy_budget": seen.run.budget,
        "reward": rewards.get("train/reward/mean", float("nan")),
        "columns": _columns(seen, metrics),
        "tokens_per_s": metrics["perf/rollout/tokens_per_s"],
        "step_s": spent.seconds["step_s"],
        "event": "",
    }
    return StepRecord(step, known(metrics), tables, status)


def _columns(seen: Seen, metrics: Mapping[str, float]) -> dict[str, float | int]:
    """What the terminal's line shows of an RLDS step beside the reward: label -> value."""
    columns: dict[str, float | int] = {"solved": metrics[f"task/{seen.run.task.name}/solved_frac"]}
    if seen.run.method.reflect.max_retries:
        columns["retries"] = int(metrics["rlds/reflect/n_retries"])
        columns["retry_success"] = metrics.get("rlds/reflect/success_frac", float("nan"))
    return columns


def _subtasks(seen: Seen) -> dict[str, float]:
    """`rlds/grade|retry|pivot/<subtask>`, the σ_batch of Eq 2, and φ where it is dynamic."""
    names = [subtask.name for subtask in seen.task.subtasks]
    out = {}
    if seen.arrays.rows.grades_NK is not None:
        found = subtask_metrics(seen.arrays.rows, names, seen.arrays.parent_N)
        out = {f"rlds/{name}": value for name, value in found.items()}
    if seen.run.method.advantage == "sdae" and bool(seen.adv.decomposed_N.any()):
        out["rlds/stage2/sigma_batch"] = seen.adv.sigma
    if seen.phi.eta > 0:
        out |= {f"rlds/phi/{n}": float(w) for n, w in zip(names, seen.phi.weights_K, strict=True)}
    return out


def _reflect_metrics(seen: Seen) -> dict[str, float]:
    """`rlds/reflect` and `rlds/parse`: candidates, what became of them, and every reply that could not be read."""
    rows, rollout = seen.rollout.rows, seen.rollout
    out: dict[str, float] = {}
    gradings = [row.grading for row in rows if row.grading is not None]
    if gradings:
        statuses = Counter(g.status for g in gradings)
        out |= {
            "rlds/parse/graded_frac": sum(g.grades is not None for g in gradings) / len(gradings),
            "rlds/parse/bad_pivots": float(sum(g.bad_pivots for g in gradings)),
            **{f"rlds/parse/grade_{s}": float(n) for s, n in sorted(statuses.items())},
        }
    if not seen.run.method.reflect.max_retries:
        return out
    said = rollout.reflections
    delta_R = seen.kept.delta_R
    out |= {
        "rlds/reflect/n_candidates": float(len(said)),
        "rlds/reflect/n_retries": float(len(delta_R)),
        "rlds/reflect/replay_fail": float(rollout.replay_failures),
        **{f"rlds/parse/reflect_{s}": float(n) for s, n in sorted(Counter(r.status for r in said).items())},
    }
    if said:
        out["rlds/reflect/parse_fail_frac"] = sum(r.retry_from is None for r in said) / len(said)
    if len(delta_R):
        retried = [rows[n] for n in seen.kept.rows_R]
        made = int(seen.kept.said_R.sum())
        whole = sum(_parent(seen, n).episode.n_response_tokens for n in seen.kept.rows_R)
        out |= {
            "rlds/reflect/success_frac": float(np.mean(delta_R > 0)),
            "rlds/reflect/solved_frac": float(np.mean([r.episode.result.solved for r in retried])),
            "rlds/reflect/reward_delta_mean": float(delta_R.mean()),
            "rlds/reflect/retry_from_mean": float(np.mean([r.episode.retry_from for r in retried])),
            "rlds/reflect/gen_ratio": made / max(whole, 1),  # §5.2: retry-to-original generation ratio
            "rlds/reflect/n_reflect_pairs": float(len(seen.kept.reflect.index_M)),
            "rlds/reflect/n_retry_pairs": float(len(seen.kept.retry.index_M)),
        }
    return out


def _parent(seen: Seen, n: int) -> Row:
    """The original that the retry in row n came from."""
    return seen.rollout.rows[int(seen.arrays.parent_N[n])]


def _fallbacks(seen: Seen) -> dict[str, float]:
    """`rlds/fallback`: how often SDAE did something else (App. "missing data")."""
    f = seen.adv.fallbacks
    out = {"rlds/group/flat_frac": f.groups_flat / max(f.groups, 1), "rlds/group/mixed_frac": _mixed(seen)}
    if seen.arrays.rows.grades_NK is None:
        return out
    return out | {
        "rlds/fallback/groups_without_grades": float(f.groups_without_grades),
        "rlds/fallback/rows_ungraded": float(f.rows_ungraded),
        "rlds/fallback/rows_negative": float(f.rows_negative),
        "rlds/fallback/pivots_clamped": float(f.pivots_clamped),
        "rlds/fallback/sigma_zero": float(f.sigma_zero),
        "rlds/reflect/fallback_frac": f.groups_without_grades / max(f.groups, 1),
    }


def _mixed(seen: Seen) -> float:
    """Share of groups that hold a solved and an unsolved rollout."""
    by_group: dict[int, set[bool]] = {}
    for row in seen.rollout.rows:
        by_group.setdefault(row.group, set()).add(row.episode.result.solved)
    return sum(len(kinds) == 2 for kinds in by_group.values()) / max(len(by_group), 1)


def _task_metrics(seen: Seen) -> dict[str, float]:
    """`task/<name>`: means over the rollouts of what the environment counts, and the task's own counters."""
    name = seen.run.task.name
    values: dict[str, list[float]] = {}
    for row in seen.rollout.rows:
        for key, value in row.episode.result.metrics.items():
            values.setdefault(key, []).append(float(value))
    out = {f"task/{name}/{key}": sum(v) / len(v) for key, v in values.items()}
    out[f"task/{name}/solved_frac"] = float(
        np.mean([r.episode.result.solved for r in seen.rollout.rows if not r.episode.is_retry])
    )
    reasons = Counter(row.episode.result.end_reason for row in seen.rollout.rows)
    out |= {f"task/{name}/end_{r}_frac": n / len(seen.rollout.rows) for r, n in sorted(reasons.items())}
    return out | {f"task/{name}/{key}": float(value) for key, value in seen.task.metrics().items()}


def _cost_metrics(seen: Seen, stats: UpdateStats) -> dict[str, float]:
    """`cost/calls` with what the numbers should be, and `cost/tokens`: ids sampled by the trained model, by role."""
    rows, config = seen.rollout.rows, seen.run.method
    n_groups = seen.run.task.prompts_per_step
    retries = sum(row.episode.is_retry for row in rows)
    gradings = [row.grading for row in rows if row.grading is not None]
    writes, reflects = config.grader in _WRITERS, config.reflector in _WRITERS
    measured = {
        "policy_gen": len(rows),
        "grade_gen": writes * len(gradings),
        "reflect_gen": reflects * len(seen.rollout.reflections),
        "learner_samples": stats.n_samples,
    }
    expected = {
        "policy_gen": n_groups * config.group_size + retries,
        "grade_gen": writes * (n_groups * config.group_size + retries) * config.grades,
        "reflect_gen": reflects * _expected_reflections(seen),
        "learner_samples": len(rows) + len(seen.kept.reflect.index_M) + len(seen.kept.retry.index_M),
    }
    tools = sum(row.episode.result.metrics.get("tool_calls", 0.0) for row in rows)
    judged = sum(row.episode.result.metrics.get("judge_calls", 0.0) for row in rows)
    return {
        **{f"cost/calls/{k}": float(v) for k, v in measured.items()},
        **{f"cost/calls/{k}_expected": float(v) for k, v in expected.items()},
        "cost/calls/tool_calls": float(tools),
        "cost/calls/external_judge_calls": float(judged),
        "health/cost_mismatch": float(sum(measured[k] != expected[k] for k in measured)),
        "cost/tokens/policy": float(sum(row.episode.n_own_tokens for row in rows)),
        "cost/tokens/grade": float(sum(g.n_tokens for g in gradings)),
        "cost/tokens/reflect": float(sum(len(r.tokens) for r in seen.rollout.reflections)),
    }


def _expected_reflections(seen: Seen) -> int:
    """Candidates, counted again from the rows: min(R, ceil(share * failures)) of each group."""
    reflect = seen.run.method.reflect
    failures = Counter(
        row.group for row in seen.rollout.rows if not row.episode.is_retry and not row.episode.result.solved
    )
    return sum(wanted_retries(reflect, n) for n in failures.values())


def _perf_metrics(seen: Seen, spent: Spent) -> dict[str, float]:
    rows, seconds = seen.rollout.rows, spent.seconds
    tokens = sum(row.episode.n_own_tokens for row in rows)
    generating = seconds["gen_s"] + seconds["gen_retry_s"]
    return {
        **{f"perf/time/{name}": value for name, value in seconds.items()},
        "perf/cpu/step_s": spent.cpu_s,
        "perf/rollout/tokens_per_s": tokens / max(generating, 1e-9),
        "perf/rollout/tokens_mean": tokens / max(len(rows), 1),
        "perf/rollout/turns_mean": float(np.mean([len(row.episode.turns) for row in rows])),
    }


def _rollout_rows(seen: Seen, step: int) -> list[TableRow]:
    adv, rows = seen.adv, seen.arrays.rows
    trained_NU = rows.counts_NU * kept_turns(rows.counts_NU, rows.train_from_N)
    std_N = token_std(adv.adv_NU, trained_NU)
    graded = rows.grades_NK is not None
    out: list[TableRow] = []
    for n, row in enumerate(seen.rollout.rows):
        episode, grading = row.episode, row.grading
        read = grading if grading is not None and grading.grades is not None else None
        out.append(
            {
                "step": step,
                "group": row.group,
                "idx": row.idx,
                "is_retry": episode.is_retry,
                "parent": row.parent,
                "retry_from_step": episode.retry_from if episode.is_retry else None,
                "R": episode.reward,
                "solved": episode.result.solved,
                "end_reason": episode.result.end_reason,
                "grades": None if read is None else list(read.grades or ()),
                "pivots": None if read is None else list(read.pivots),
                "A_k": adv.adv_NK[n].tolist() if graded else None,
                "A_sdae": float(adv.adv_N[n]) if seen.run.method.advantage == "sdae" else None,
                "A_grpo": float(adv.grpo_N[n]),
                "token_adv_std": float(std_N[n]),
                "prompt_id": episode.instance.instance_id,
                "parse_status": None if grading is None else grading.status,
                "n_turns": len(episode.turns),
                "n_tokens": episode.n_response_tokens,
            }
        )
    return out


def _pair_rows(seen: Seen, step: int) -> list[TableRow]:
    """Every retry, and what L_aux took of it: `weight` δ/Σδ among the kept responses, `used` if it is one of them."""
    kept, rows = seen.kept, seen.rollout.rows
    weights = {
        part: dict(zip(pairs.index_M.tolist(), pairs.weight_M.tolist(), strict=True))
        for part, pairs in ((REFLECT, kept.reflect), (RETRY, kept.retry))
    }
    out: list[TableRow] = []
    for r, n in enumerate(kept.rows_R):
        row = rows[n]
        out.append(
            {
                "step": step,
                "group": row.group,
                "parent": row.parent,
                "retry": row.idx,
                "delta_R": float(kept.delta_R[r]),
                "delta_grades": _delta_grades(row, _parent(seen, n)),
                "retry_from_step": row.episode.retry_from,
                "weight": weights[RETRY].get(r, 0.0),
                "used": r in weights[RETRY],
                "reflect_weight": weights[REFLECT].get(r, 0.0),
                "reflect_used": r in weights[REFLECT],
                "addition": row.episode.addition,
            }
        )
    return out


def _delta_grades(row: Row, parent: Row) -> list[float] | None:
    """Grades of the retry less the original's; None unless both are graded."""
    pair = [r.grading.grades if r.grading is not None else None for r in (row, parent)]
    if pair[0] is None or pair[1] is None:
        return None
    return [float(a - b) for a, b in zip(pair[0], pair[1], strict=True)]


def _reflection_rows(seen: Seen, step: int, texts: bool) -> list[TableRow]:
    """Every reflection, those that gave no retry too; its text where transcripts are kept."""
    rollout = seen.rollout
    return [
        {
            "step": step,
            "group": row.group,
            "idx": row.idx,
            "status": said.status,
            "retry_from_step": said.retry_from,
            "n_tokens": len(said.tokens),
            "text": said.text if texts else None,
        }
        for row, said in zip(rollout.candidates, rollout.reflections, strict=True)
    ]


def _transcript_rows(seen: Seen, step: int) -> list[TableRow]:
    shown = [list(pair) for pair in seen.task.demonstration]
    out: list[TableRow] = []
    for n, row in enumerate(seen.rollout.rows):
        turn_T = row.episode.turn_of_token()
        adv_T = np.where(turn_T >= 0, seen.adv.adv_NU[n][np.where(turn_T >= 0, turn_T, 0)], 0.0)
        out.append(
            {
                "step": step,
                "group": row.group,
                "idx": row.idx,
                "instance": _instance_json(row.episode),
                "system": row.episode.system,
                "demonstration": shown,
                "first_observation": row.episode.first_observation,
                "turns": turns_json(row.episode),
                "token_turn": turn_T.tolist(),
                "token_adv": adv_T.tolist(),
                "grading": "" if row.grading is None else row.grading.text,
                "reflection": "" if row.reflection is None else row.reflection.text,
                "addition": row.episode.addition,
            }
        )
    return out


def _instance_json(episode: Episode) -> dict[str, Any]:
    """What was played, as JSON values: enough to open the environment again."""
    instance = episode.instance
    return {"task": instance.task, "instance_id": instance.instance_id, "data": dict(instance.data)}


def turns_json(episode: Episode) -> list[dict[str, Any]]:
    """The turns as JSON values: texts, and how many ids each has."""
    return [
        {
            "text": turn.text,
            "observation": turn.observation,
            "n_tokens": len(turn.tokens),
            "n_bridge": len(turn.bridge),
            "tokens": list(turn.tokens),
            "sampled": u >= episode.retry_from,
            "finished": turn.finished,
            "info": dict(turn.info),
        }
        for u, turn in enumerate(episode.turns)
    ]

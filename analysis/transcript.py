"""One rollout of an RLDS run, put together from the tables `rollouts`, `transcripts` and `retry_pairs`.

Nothing is computed anew: rewards, grades, A_ik, Â_i and the advantage of each turn are what the run wrote down. Two
things are added for people. A pivot beyond the last turn is marked at the last turn, as the kernel of Eq 3 has it. And
where the agent saw grid tokens instead of words (the embedded FrozenLake run), the observations are drawn by the text
environment, from the board and the actions; a drawing that does not end where the record says is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from racelab.analysis.load import load_table
from racelab.analysis.transcript_text import ranges
from racelab.analysis.transcript_types import RetryLink, Rollout, Scaling, SubtaskRow, Transcript, TurnView
from racelab.experiments.errors import DataError
from racelab.experiments.fsio import read_json
from racelab.experiments.methods.rlds.sdae import FLAT
from racelab.experiments.runfolder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


def load_rollouts(run: RunFolder, step: int, group: int | None = None) -> list[Rollout]:
    """The rollouts of a step, or of one of its groups, in order.

    Raises:
        DataError: not an RLDS run, or no such step or group; the message names those that there are.
    """
    if run.info().get("paper") != "rlds" and run.info().get("method") != "rlds":
        raise DataError(
            f"run {run.run_id} is a RACE run, which has no rollouts; `racelab show {run.run_id} --step {step}` shows "
            "the responses of the step"
        )
    rows = _records(load_table(run, "rollouts", step=step))
    if not rows:
        raise DataError(f"run {run.run_id} has no rollouts of step {step}; {_steps(run, 'rollouts')}")
    found = [_rollout(row) for row in sorted(rows, key=lambda row: (row["group"], row["idx"]))]
    if group is None:
        return found
    chosen = [rollout for rollout in found if rollout.group == group]
    if not chosen:
        groups = ranges(sorted({rollout.group for rollout in found}))
        raise DataError(f"step {step} of run {run.run_id} has no group {group}; it has {groups}")
    return chosen


def load_transcripts(run: RunFolder, step: int, group: int, idx: int | None = None) -> list[Transcript]:
    """The rollouts of a group with their turns, or one of them.

    Raises:
        DataError: as `load_rollouts`; or no rollout `idx`; or no transcripts were kept at that step.
    """
    rollouts = load_rollouts(run, step, group)
    wanted = [r for r in rollouts if idx is None or r.idx == idx]
    if not wanted:
        there = ranges([r.idx for r in rollouts])
        retries = ranges([r.idx for r in rollouts if r.is_retry])
        more = f" ({retries}: retries)" if retries else ""
        raise DataError(
            f"group {group} of step {step} of run {run.run_id} has no rollout {idx}; it has {there}{more}"
        )
    texts = {(row["group"], row["idx"]): row for row in _records(load_table(run, "transcripts", step=step))}
    if any((r.group, r.idx) not in texts for r in wanted):
        raise DataError(
            f"run {run.run_id} kept no transcripts of step {step}; {_steps(run, 'transcripts')} "
            f"(run.transcripts_every); `racelab show {run.run_id} --rollout {step}:{group}` lists the group"
        )
    links = [
        _link(row) for row in _records(load_table(run, "retry_pairs", step=step)) if row["group"] == group
    ]
    setting = _Setting.of(run, step, any(r.grades is not None for r in rollouts))
    return [_transcript(setting, r, texts[r.group, r.idx], links) for r in wanted]


def transcript_steps(run: RunFolder) -> list[int]:
    """The steps whose transcripts were kept."""
    return _kept(run, "transcripts")


def _kept(run: RunFolder, table: str) -> list[int]:
    return sorted({int(step) for step in load_table(run, table, columns=["step"])["step"]})


def _steps(run: RunFolder, table: str) -> str:
    kept = _kept(run, table)
    steps = "step" if len(kept) == 1 else "steps"
    return f"there are {table} of {steps} {ranges(kept)}" if kept else f"there are no {table} at all"


@dataclass(frozen=True, slots=True)
class _Setting:
    """What all rollouts of a group have in common."""

    run_id: str
    run_name: str
    task: str
    condition: str
    subtasks: tuple[tuple[str, float], ...]
    max_turns: int
    mask_both: bool
    demonstrates: bool
    grader: str
    scaling: Scaling

    @classmethod
    def of(cls, run: RunFolder, step: int, graded: bool) -> _Setting:
        """Read from the run's own files; φ as logged at the step where it is dynamic.

        Args:
            run: opened.
            step: of the group.
            graded: whether a rollout of the group has grades.

        Raises:
            ConfigError, RunFolderError: the run's config or its `setup.json` cannot be read.
        """
        from racelab.configs.compose import read_composed

        info = run.info()
        config = read_composed(run.path / "config" / "composed.yaml", to_look=True).config.model_dump()
        static = read_json(run.path / "setup.json")["subtasks"]
        logged, method = _logged(load_table(run, "metrics", step=step)), config["method"]
        return cls(
            run_id=run.run_id,
            run_name=str(info.get("name", "")),
            task=str(info.get("task") or ""),
            condition=str(info.get("condition") or ""),
            subtasks=tuple((name, float(logged.get(f"rlds/phi/{name}", weight))) for name, weight in static),
            max_turns=int(config["task"]["max_turns"]),
            mask_both=method["mask_prefix"] == "both",
            demonstrates=bool(config["task"]["demonstration"]),
            grader=method["grader"] if method["grading"] == "two_pass" else "",
            scaling=_scaling(method, graded, logged.get("rlds/stage2/sigma_batch")),
        )


def _scaling(method: Row, graded: bool, sigma: float | None) -> Scaling:
    """No kernel where σ_batch is 0: SDAE has stage 2's broadcast there."""
    flat = method["sdae"]["kernel"] == "none" or (sigma is not None and sigma <= FLAT)
    return Scaling(
        decomposed=graded,
        sigma_batch=sigma,
        kernel_sigma=None if flat else float(method["sdae"]["kernel_sigma"]),
        amplification=float(method["positive_amplification"]),
    )


def _logged(metrics: pd.DataFrame) -> dict[str, float]:
    """Metric -> value at a step, the last written."""
    rows = _records(metrics)
    return {row["name"]: row["value"] for row in rows if row["value"] is not None}


def _transcript(setting: _Setting, rollout: Rollout, row: Row, links: Sequence[RetryLink]) -> Transcript:
    own = tuple(link for link in links if (link.retry if rollout.is_retry else link.parent) == rollout.idx)
    first, observations = row["first_observation"] or "", [turn["observation"] for turn in row["turns"]]
    drawing = None if first or any(observations) else _draw(row, setting.max_turns)
    if drawing is not None:
        first, *observations = drawing
    subtasks = _subtasks(setting, rollout, row["turns"])
    token_turn, token_adv = tuple(row["token_turn"]), tuple(row["token_adv"])
    start = rollout.retry_from if rollout.is_retry else None
    if start is None and setting.mask_both:
        start = min((link.retry_from for link in own), default=None)
    turns = tuple(
        TurnView(
            index=u,
            text=turn["text"],
            tokens=tuple(turn["tokens"]),
            sampled=bool(turn["sampled"]),
            finished=bool(turn["finished"]),
            masked=start is not None and u < start,
            advantage=_of_turn(u, token_turn, token_adv),
            pivots=tuple(s.name for s in subtasks if s.pivot_turn == u),
            observation=observations[u],
            drawn=drawing is not None,
            info=turn["info"],
        )
        for u, turn in enumerate(row["turns"])
    )
    return Transcript(
        setting.run_id,
        setting.run_name,
        setting.task,
        setting.condition,
        rollout=rollout,
        scaling=setting.scaling,
        subtasks=subtasks,
        retries=own,
        instance=row.get("instance"),
        system=row["system"] or "",
        demonstration=_demonstration(row.get("demonstration"), setting.demonstrates),
        first_observation=first,
        drawn=drawing is not None,
        turns=turns,
        grader=setting.grader,
        grading=row["grading"] or "",
        reflection=row["reflection"] or "",
        addition=row["addition"] or "",
        token_turn=token_turn,
        token_adv=token_adv,
    )


def _demonstration(kept: Sequence[Sequence[str]] | None, shown: bool) -> tuple[tuple[str, str], ...] | None:
    """The pairs that a transcript kept; None for a demonstration that it did not keep."""
    if kept is None:
        return None if shown else ()
    return tuple((said, reply) for said, reply in kept)


def _subtasks(setting: _Setting, rollout: Rollout, turns: Sequence[Row]) -> tuple[SubtaskRow, ...]:
    none = (None,) * len(setting.subtasks)
    columns = (rollout.grades or none, rollout.pivots or none, rollout.adv_K or none)
    last = max((u for u, turn in enumerate(turns) if turn["n_tokens"]), default=None)
    return tuple(
        SubtaskRow(
            name,
            phi,
            grade,
            pivot,
            None if pivot is None or pivot < 0 or last is None else min(pivot, last),
            advantage,
        )
        for (name, phi), grade, pivot, advantage in zip(setting.subtasks, *columns, strict=True)
    )


def _of_turn(turn: int, token_turn: Sequence[int], token_adv: Sequence[float]) -> float | None:
    """The one value of a turn's tokens."""
    return next((a for u, a in zip(token_turn, token_adv, strict=True) if u == turn), None)


def _draw(row: Row, max_turns: int) -> list[str] | None:
    """The first observation and those of the turns, as FrozenLake would put them in words.

    None: another task, a run that did not write its boards down, or a drawing that leaves the record's cells.
    """
    instance = row.get("instance")
    if not instance or instance.get("task") != "frozenlake":
        return None
    from racelab.experiments.episodes import Instance
    from racelab.experiments.tasks.frozenlake.env import FrozenLakeEnv

    try:
        game = FrozenLakeEnv(Instance(**instance), max_turns)
        drawn = [game.reset().text]
        for turn in row["turns"]:
            seen = game.step(f"<action>{turn['text']}</action>")
            if seen.info["cell"] != turn["info"].get("cell"):
                return None
            drawn.append(seen.text)
    except (DataError, RuntimeError, TypeError):  # no board, a game that was over before, another layout
        return None
    return drawn


def _rollout(row: Row) -> Rollout:
    grades, pivots, adv_K = row.get("grades"), row.get("pivots"), row.get("A_k")
    return Rollout(
        step=int(row["step"]),
        group=int(row["group"]),
        idx=int(row["idx"]),
        is_retry=bool(row["is_retry"]),
        parent=_int(row.get("parent")),
        retry_from=_int(row.get("retry_from_step")),
        reward=float(row["R"]),
        solved=None if row.get("solved") is None else bool(row["solved"]),
        end_reason=str(row.get("end_reason") or ""),
        instance_id=str(row.get("prompt_id") or ""),
        grades=None if grades is None else tuple(_int(g) for g in grades),
        pivots=None if pivots is None else tuple(_int(p) for p in pivots),
        adv_K=None if adv_K is None else tuple(map(float, adv_K)),
        adv_sdae=row.get("A_sdae"),
        adv_grpo=row.get("A_grpo"),
        token_adv_std=row.get("token_adv_std"),
        parse_status=row.get("parse_status"),
        n_turns=int(row["n_turns"]),
        n_tokens=int(row["n_tokens"]),
    )


def _link(row: Row) -> RetryLink:
    grades = row.get("delta_grades")
    return RetryLink(
        retry=int(row["retry"]),
        parent=int(row["parent"]),
        retry_from=int(row["retry_from_step"]),
        delta_R=float(row["delta_R"]),
        delta_grades=None if grades is None else tuple(map(float, grades)),
        weight=float(row["weight"]),
        used=bool(row["used"]),
        reflect_weight=float(row.get("reflect_weight") or 0.0),
        reflect_used=bool(row.get("reflect_used")),
    )


def _int(value: Any) -> int | None:
    return None if value is None or math.isnan(value) else int(value)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values; NaN and other missing values as None."""
    columns = [[_plain(value) for value in frame[name]] for name in frame.columns]
    return [dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value

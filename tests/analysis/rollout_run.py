"""A run of an RLDS condition as a training leaves it, of rows written by hand: small enough to check by eye.

Two subtasks, plan (φ 0.75) and act (0.25); transcripts are kept at step 2; step 1 has rollouts
only. Step 2, whose σ_batch is 0.25:

    0:0  original, solved; grades 5 3, pivots turn 0 and turn 12, which this rollout of two turns does not have; two
         worked examples stood before its first observation
    0:1  original, not solved, its grades could not be read
    0:2  retry of 1 from turn 1; its texts try to act on a terminal and on a page
    1:0  FrozenLake on grid tokens: no words at all; Down, then Right onto the goal
    1:1  the same, but the record says another cell than the board gives
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from racelab.configs.compose import compose
from racelab.experiments.fsio import write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

Row = dict[str, Any]

HOSTILE = "<script>document.title='taken'</script>\x1b[31mred\x1b[0m [bold]b[/bold] \u202eabc"
LONG = "</pre><img src='http://127.0.0.1:9/x.png'> " + "word " * 400
BOARD = {"task": "frozenlake", "instance_id": "train-b", "data": {"rows": ["SF", "FG"], "path": 2}}
QUESTION = {"task": "hotpotqa", "instance_id": "train-q", "data": {"question": "Who?", "answers": ["A & B"]}}


EXAMPLES = [["Where?", "I ask."], ["<b>There.", "There"]]


def rollout(step: int, group: int, idx: int, **values: Any) -> Row:
    """A row of `rollouts`."""
    return {
        "step": step, "group": group, "idx": idx, "is_retry": False, "parent": None, "retry_from_step": None,
        "R": 0.0, "solved": False, "end_reason": "turns", "grades": None, "pivots": None, "A_k": None,
        "A_sdae": 0.0, "A_grpo": 0.0, "token_adv_std": 0.0, "prompt_id": "train-q", "parse_status": "ok",
        "n_turns": 2, "n_tokens": 4, **values,
    }  # fmt: skip


def turn(text: str, tokens: list[int], observation: str, **values: Any) -> Row:
    """One of the turns of a transcript."""
    return {
        "text": text, "tokens": tokens, "n_tokens": len(tokens), "n_bridge": 1, "observation": observation,
        "sampled": True, "finished": True, "info": {}, **values,
    }  # fmt: skip


def transcript(
    step: int, group: int, idx: int, turns: list[Row], advantages: list[float], **values: Any
) -> Row:
    """A row of `transcripts`; each turn but the last has a bridge of one token."""
    token_turn: list[int] = []
    token_adv: list[float] = []
    for u, (each, advantage) in enumerate(zip(turns, advantages, strict=True)):
        token_turn += [u] * each["n_tokens"] + [-1] * (u < len(turns) - 1)
        token_adv += [advantage] * each["n_tokens"] + [0.0] * (u < len(turns) - 1)
    return {
        "step": step, "group": group, "idx": idx, "instance": QUESTION, "system": "Answer.\nBe brief.",
        "first_observation": "Who?", "demonstration": [], "turns": turns, "token_turn": token_turn,
        "token_adv": token_adv, "grading": "", "reflection": "", "addition": "", **values,
    }  # fmt: skip


def rollouts() -> list[Row]:
    """Of step 2."""
    return [
        rollout(2, 0, 0, R=1.0, solved=True, end_reason="answer", grades=[5, 3], pivots=[0, 12], A_k=[0.4, 0.1],
                A_sdae=1.3, A_grpo=0.7071, token_adv_std=0.25),
        rollout(2, 0, 1, A_k=[-0.5, -0.5], A_sdae=-2.0, A_grpo=-1.4142, parse_status="bad_json"),
        rollout(2, 0, 2, is_retry=True, parent=1, retry_from_step=1, R=1.0, solved=True, end_reason="answer",
                grades=[4, 4], pivots=[None, 1], A_k=[0.1, 0.4], A_sdae=0.7, A_grpo=0.7071),
        *(rollout(2, 1, i, R=1.0, solved=True, end_reason="goal", prompt_id="train-b", n_tokens=2, grades=[5, 5],
                  pivots=[None, None], A_k=[0.0, 0.0]) for i in (0, 1)),
    ]  # fmt: skip


def transcripts() -> list[Row]:
    """Of step 2."""
    walk = [
        turn("Down", [6], "", info={"cell": 2, "action": 1}),
        turn("Right", [8], "", info={"cell": 3, "action": 3}),
    ]
    lost = [walk[0], turn("Right", [8], "", info={"cell": 1, "action": 3})]
    grid = {"instance": BOARD, "system": "", "first_observation": ""}
    failed = turn("I search.", [1, 2], LONG)
    return [
        transcript(2, 0, 0, [turn("I look.", [1, 2, 3], "Found."), turn("A & B", [9], "Right.")], [1.5, 0.75],
                   demonstration=EXAMPLES),
        transcript(2, 0, 1, [failed, turn("C", [3, 4], "Wrong.", finished=False)], [-2.0, -2.0]),
        transcript(2, 0, 2, [{**failed, "sampled": False}, turn(HOSTILE, [5, 6], "Right.")], [0.0, 0.9],
                   system="Answer.\nBe brief.\nLook twice.", addition="Look twice.", reflection='{"report": "hasty"}',
                   grading='{"plan": 4}'),
        transcript(2, 1, 0, walk, [0.0, 0.0], **grid),
        transcript(2, 1, 1, lost, [0.0, 0.0], **grid),
    ]  # fmt: skip


PAIR: Row = {
    "step": 2, "group": 0, "parent": 1, "retry": 2, "delta_R": 1.0, "delta_grades": None, "retry_from_step": 1,
    "weight": 0.625, "used": True, "reflect_weight": 0.0, "reflect_used": False, "addition": "Look twice.",
}  # fmt: skip


def write_run(
    root: Path, *overrides: str, status: str = "finished", metrics: dict[str, float] | None = None
) -> RunFolder:
    """The run in the folder `root`; `status` running leaves its record without an end, so that no tables are built."""
    words = ["task=hotpotqa", "tracking=none", *overrides]
    config = compose(words)
    run = RunFolder.create(
        root,
        "toy",
        composed_yaml=config.yaml,
        overrides=words,
        info={"kind": "train", **config.config.facts()},
    )
    write_json_atomic(run.path / "setup.json", {"subtasks": [["plan", 0.75], ["act", 0.25]]})
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
        tracker.record(StepRecord(1, {"train/reward/mean": 0.0}, {"rollouts": [rollout(1, 0, 0)]}))
        tables = {"rollouts": rollouts(), "transcripts": transcripts(), "retry_pairs": [PAIR]}
        logged = {"train/reward/mean": 0.5, "rlds/stage2/sigma_batch": 0.25, **(metrics or {})}
        tracker.record(StepRecord(2, logged, tables))
        if status != "running":
            tracker.close(status, "")
    return run

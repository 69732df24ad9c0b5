"""Words that the terminal's and the page's view of a rollout share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from racelab.analysis.transcript_types import RetryLink, Rollout, SubtaskRow, Transcript, TurnView

_SHOWN = 12
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""What steers a terminal, turns the direction of a line, cannot be seen or cannot be printed; not tab and newline."""


def signed(value: float | None) -> str:
    """`+0.123`; `-` where there is none. What rounds to nothing is `+0.000`, never `-0.000`."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:+.3f}"
    return "+0.000" if text == "-0.000" else text


def visible(text: str) -> str:
    r"""A model's or a web page's text with control characters written as `\x1b`, so that none acts on a terminal."""
    plain = text.replace("\r\n", "\n")
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], plain)


def cut(text: str, lines: int, chars: int) -> tuple[str, int]:
    """The beginning of a text, and how many characters were left out.

    Args:
        text: any.
        lines: kept at most.
        chars: kept at most.
    """
    kept = "\n".join(text.splitlines()[:lines])[:chars].rstrip()
    return (kept, len(text) - len(kept)) if len(text.rstrip()) > len(kept) else (text, 0)


def ranges(steps: Sequence[int]) -> str:
    """`1-4, 8, 12-13`; of many pieces the first dozen and the last."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    if len(words) > _SHOWN + 2:
        words = [*words[:_SHOWN], "...", words[-1]]
    return ", ".join(words)


_COLOURS = (
    "Eq 3 weighs turns, not tokens: every token of a reply has the advantage that stands at its turn, so a reply has "
    "one colour, green above 0 and red below, the deeper the nearer |Â_it| is to the largest of the rollout "
    "({largest:.3f})."
)
_NO_COLOURS = "No advantage in this rollout: that of every turn is 0, so no reply is coloured."
_PIVOTS = "◆: the turn is the pivot of that subtask. A pivot of - stands for no decisive turn: all turns count alike."
_LEGEND = "A agent, B goal, C hole, D safe (the symbols that {agent} is shown, RLDS App. D.1)"
_GRADERS = {
    "policy": "graded by the policy itself",
    "form": "graded by the policy in a form",
    "random": "grades drawn at random",
    "scripted": "graded by a program",
}


def notes(transcript: Transcript) -> list[tuple[str, str]]:
    """Label and text of what explains the numbers of a rollout."""
    t = transcript
    colours = _COLOURS.format(largest=t.largest) if t.largest else _NO_COLOURS
    return [("from A_ik", _derivation(t)), ("note", f"{colours} {_PIVOTS}")]


def _derivation(t: Transcript) -> str:
    """How the advantage of the rollout, and of its turns, came from A_ik or the rewards."""
    r, s = t.rollout, t.scaling
    scalar = "GRPO is the reward, standardised within the group"
    if r.adv_sdae is None:
        unused = "; A_ik (RLDS Eq 1) is not trained with" if s.decomposed else ""
        return f"{scalar}{unused}; every turn has the same value."
    if not s.decomposed:
        return f"no rollout of the group has grades, so Â_i is that of GRPO (RLDS §3.3); {scalar}."
    sigma = "σ_batch the std of the sums over the step"
    if s.sigma_batch is not None:
        sigma = f"σ_batch = {s.sigma_batch:.3f} (this step)"
    kernel = "every turn has Â_i, as there is no pivot kernel"
    if s.kernel_sigma is not None:
        kernel = (
            f"turn values: times the pivot kernel (σ = {s.kernel_sigma:g} turn), mean one over the tokens"
        )
    more = ""
    if r.is_retry and s.amplification != 1.0:
        more = f", in a retry times {s.amplification:g} if above 0 (method.positive_amplification)"
    return f"Â_i = Σ φ_k A_ik / (σ_batch + ε), {sigma}{more}; {kernel}; {scalar}. RLDS Eqs 1-3."


def facts(transcript: Transcript) -> list[tuple[str, str]]:
    """Label and text of what stands above a rollout, in order; what there is none of is left out."""
    r = transcript.rollout
    solved = {True: "solved", False: "not solved", None: ""}[r.solved]
    out = [
        ("run", f"{transcript.run_name} {transcript.run_id}"),
        ("task", f"{transcript.task}, condition {transcript.condition}"),
        ("rollout", f"{r.place} (step {r.step}, group {r.group}, idx {r.idx})"),
        ("instance", r.instance_id),
        ("reward", ", ".join(word for word in (signed(r.reward), solved, f"end: {r.end_reason}") if word)),
        ("kind", _kind(transcript)),
        ("length", f"{r.n_turns} turns, {r.n_tokens} sampled tokens"),
        ("advantage", _advantage(r)),
        ("grading", _grading(transcript)),
        ("board", _legend(transcript)),
    ]
    links = [
        ("retries" if not r.is_retry else "retry", retried(link, not r.is_retry))
        for link in transcript.retries
    ]
    return [(label, visible(text)) for label, text in out + links if text]


def _legend(t: Transcript) -> str:
    """What the letters of a board mean; "" where no board is shown."""
    if t.task != "frozenlake" or not t.first_observation:
        return ""
    return _LEGEND.format(agent="an agent of the text task" if t.drawn else "the agent")


def _grading(t: Transcript) -> str:
    """What became of the grading, and who graded."""
    status = t.rollout.parse_status
    return ", ".join(word for word in (status, _GRADERS.get(t.grader, "")) if word) if status else "none"


def _kind(transcript: Transcript) -> str:
    r = transcript.rollout
    if r.is_retry:
        return f"retry of {r.step}:{r.group}:{r.parent} from turn {r.retry_from}"
    return "original, retried" if transcript.retries else "original"


def _advantage(r: Rollout) -> str:
    """Â_i, the scalar one, and which of them was trained with."""
    if r.adv_sdae is None:
        return f"scalar GRPO {signed(r.adv_grpo)} (trained with)"
    spread = f", std over tokens {r.token_adv_std:.3f}" if r.token_adv_std is not None else ""
    return f"Â_i {signed(r.adv_sdae)} (SDAE, trained with), scalar GRPO {signed(r.adv_grpo)}{spread}"


def retried(link: RetryLink, by_retry: bool) -> str:
    """One line of a retry: which, from where, how much better, and what the auxiliary loss took.

    Args:
        link: the pair.
        by_retry: begins with the idx of the retry, for the view of its original.
    """
    grades = "" if link.delta_grades is None else ", Δg " + " ".join(f"{g:+.0f}" for g in link.delta_grades)
    used = [
        f"{name} (weight {weight:.3f})"
        for name, weight, taken in (
            ("retry distillation", link.weight, link.used),
            ("reflection", link.reflect_weight, link.reflect_used),
        )
        if taken
    ]
    loss = f", auxiliary loss: {', '.join(used)}" if used else ", not in the auxiliary loss"
    head = f"idx {link.retry} from turn {link.retry_from}, " if by_retry else ""
    return f"{head}δR {signed(link.delta_R)}{grades}{loss}"


def turn_words(turn: TurnView) -> list[str]:
    """What stands at a turn besides its number and its advantage."""
    words = ["sampled" if turn.sampled else "replayed"]
    words += ["masked"] * turn.masked
    words += ["cut at the limit"] * (not turn.finished)
    return words + [f"◆ {name}" for name in turn.pivots]


def subtask_cells(row: SubtaskRow) -> list[str]:
    """φ, grade, pivot and A_ik of a subtask; a clamped pivot as `12 → 9`."""
    pivot = "-" if row.pivot is None else str(row.pivot)
    if row.pivot is not None and row.pivot_turn not in (row.pivot, None):
        pivot += f" → {row.pivot_turn}"
    grade = "-" if row.grade is None else str(row.grade)
    return [visible(row.name), f"{row.phi:.3f}", grade, pivot, signed(row.advantage)]


SUBTASK_COLUMNS = ("subtask", "φ", "grade", "pivot", "A_ik")


def blocks(transcript: Transcript) -> list[tuple[str, str]]:
    """The texts before the first turn: label and text, empty ones left out."""
    t = transcript
    what = {"addition": t.addition, "reflection": t.reflection, "system prompt": t.system}
    if t.demonstration is None:
        what[f"{DEMONSTRATION} (task.demonstration=true)"] = "(its texts were not kept by this run)"
    elif t.demonstration:
        turns = "1 turn" if len(t.demonstration) == 1 else f"{len(t.demonstration)} turns"
        pairs = (f"user: {said}\nreply: {reply}" for said, reply in t.demonstration)
        what[f"{DEMONSTRATION}: {turns} (task.demonstration=true)"] = "\n".join(pairs)
    what["first observation" + drawn_note(t.drawn)] = t.first_observation
    return [(label, visible(text)) for label, text in what.items() if text.strip()]


DEMONSTRATION = "demonstration"
"""How the label of the worked examples begins."""


def grading_label(transcript: Transcript) -> str:
    """Of the grader's text: what a form holds are not words of the policy."""
    return "grader's form, filled in by the policy" if transcript.grader == "form" else "grader's reply"


def drawn_note(drawn: bool) -> str:
    """Behind the label of an observation that the agent had as grid tokens."""
    return " (drawn; the agent saw grid tokens)" if drawn else ""

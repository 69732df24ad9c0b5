"""The end of a run, for people: what happened, what rose and what did not, and what it may be taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from racelab.cli.console import print_table

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder


_FEW = 10
"""Fewer held-out prompts than this give no interval worth printing, and no verdict."""


def print_summary(
    summary: Mapping[str, Any], end: Mapping[str, Any], folder: RunFolder, command: str, reference: str
) -> None:
    """Prints `analysis.summary.summarise`'s dict; `command` and `reference`: what to type for racelab and the run."""
    print()
    print(f"Run {summary['name']} ({summary['run_id']}) has finished.")
    _what_happened(summary, end)
    _learning(summary)
    _rubric_role(summary)
    _judge(summary)
    _where(folder, command, reference)


def number(value: object, digits: int = 2) -> str:
    """A number, or `-` where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _what_happened(summary: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    steps, routes = summary["steps"], summary.get("routes", {})
    resumed = " (the last attempt)" if end.get("attempts", 1) > 1 else ""
    wall = end.get("wall_s")
    minutes = None if wall is None else wall / 60
    print(
        f"  {steps['policy']} policy and {steps['rubric']} rubric updates; "
        f"{number(minutes, 1)} min, peak memory {number(end.get('peak_gib'), 1)} GiB{resumed}."
    )
    phases = [f"{p['kind']} {p['length']} ({p['end_reason']})" for p in summary.get("phases", [])]
    print(f"  Phases: {', '.join(phases) or 'none ended'}.")
    print(f"  Groups: {', '.join(f'{v} {k.replace(chr(95), chr(45))}' for k, v in routes.items()) or '-'}.")
    print(
        f"  Quarantine rate {number(summary.get('quarantine_rate'))}; advantage collapse (all rewards equal) "
        f"{number(summary.get('collapse_rate'))} of the groups."
    )
    health = summary.get("health", {})
    if health.get("deferred_switches"):
        print(f"  {health['deferred_switches']} switches were deferred for want of pool entries.")
    if health.get("trqc_first_saturated"):
        print(
            f"  TRQC was held at a bound in {number(health.get('trqc_saturated_steps'), 0)} steps, "
            f"first at {health['trqc_first_saturated']}."
        )
    if health.get("nonfinite"):
        print(f"  WARNING: values that are not finite: {', '.join(health['nonfinite'])}.")
    if health.get("cost_mismatch"):
        print(
            f"  WARNING: {health['cost_mismatch']} model-call counts differ from what follows from the steps."
        )


def _interval(cell: Mapping[str, Any]) -> str:
    if cell.get("difference") is None:
        return "-"
    return f"{cell['difference']:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}]"


def _learning(summary: Mapping[str, Any]) -> None:
    print()
    print("Held-out prompts (fixed rubrics of the untrained model, paired over prompts, 95 % interval)")
    names = {
        "judged_reward": "judged reward",
        "rule_success": "success by rule (no model involved)",
        "ended": "answers that end by themselves",
    }
    rows = []
    for key, name in names.items():
        cell = summary.get("validation", {}).get(key, {})
        before, after, prompts = cell.get("before"), cell.get("after"), str(cell.get("n", "-"))
        rows.append([name, number(before), number(after), _interval(cell), prompts])
    print_table(["", "before", "after", "difference", "prompts"], rows, right=["before", "after", "prompts"])
    print(
        "Each cell is a few samples per prompt: another draw of the same answers moves it too, by up to 0.1 seen."
    )
    epochs = ", ".join(number(v) for v in summary.get("reward_by_epoch", []))
    print(f"Judged training reward per epoch: {epochs or '-'}.")
    if "sharpening" in summary:
        _sharpening(summary["sharpening"])


def _sharpening(control: Mapping[str, Any]) -> None:
    print()
    print("Is it only sharpening? Success by rule, untrained and trained model at the same temperatures")
    rows = [
        [
            f"{r['temperature']:g}",
            number(r.get("untrained_passed")),
            number(r.get("trained_passed")),
            _interval(r.get("paired", {})),
            number(r.get("untrained_judged")),
            number(r.get("trained_judged")),
        ]
        for r in control["rows"]
    ]
    columns = ["temperature", "untrained", "trained", "difference", "judged untrained", "judged trained"]
    print_table(columns, rows, right=columns)
    beyond = control.get("beyond")
    if beyond is None or beyond.get("difference") is None:
        return
    best = control["best_untrained_temperature"]
    verdict = "inside the noise"
    if beyond["low"] > 0:
        verdict = "beyond sharpening"
    elif beyond["high"] < 0:
        verdict = "below what a lower temperature gives for free"
    print(
        f"Trained model at temperature {control['rows'][0]['temperature']:g} against the untrained one at its best, "
        f"{best:g}: {_interval(beyond)}: {verdict}."
    )


def _rubric_role(summary: Mapping[str, Any]) -> None:
    updates, rubrics = summary.get("rubric_updates", {}), summary.get("rubrics", {})
    print()
    print("Rubric role")
    if updates.get("reward"):
        print(
            f"  Rubric reward, first and last third of {len(updates['reward'])} updates: {_thirds(updates['reward'])}."
        )
        print(
            f"  Margin gained over the rubric that failed, likewise: {_thirds(updates.get('gain', []), 3)}."
        )
        print(
            f"  Pool entries used with a margin above 0: {updates.get('positive_margins', '-')} of "
            f"{updates['entries']}."
        )
    rows = []
    for label in ("untrained", "trained"):
        r = rubrics.get(label, {})
        keys = ("usable_frac", "n_criteria", "grounded_frac", "specific_frac", "distinct_frac")
        rows.append([label, *(number(r.get(k)) for k in keys)])
    columns = ["", "usable", "criteria", "grounded", "specific", "distinct"]
    print_table(columns, rows, right=columns[1:])
    for text in rubrics.get("texts", []):
        print(f"  {text['prompt_id']}")
        print(f"    before: {_one_line(text['untrained'])}")
        print(f"    after:  {_one_line(text['trained'])}")


def _thirds(values: Sequence[float], digits: int = 2) -> str:
    """Means of the first and the last third; single updates swing with the entries they hold."""
    if not values:
        return "-"
    n = max(1, len(values) // 3)
    first, last = values[:n], values[-n:]
    return f"{number(sum(first) / len(first), digits)} → {number(sum(last) / len(last), digits)}"


def _one_line(text: str, limit: int = 160) -> str:
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _judge(summary: Mapping[str, Any]) -> None:
    judge = summary.get("judge", {})
    before, after = judge.get("before", {}), judge.get("after", {})
    if not before:
        return
    print()
    print("The judge (0.5 is chance; it is a stand-in, not a grader)")
    rows = []
    names = {
        "auc_rules": "ranks rule successes above failures, fixed rubrics",
        "auc_rules_now": "the same, rubrics as written by the model now",
        "auc_own_rubric": "prefers a prompt's own rubric to another's, fixed rubrics",
        "auc_own_rubric_now": "the same, rubrics as written now",
        "auc_own_response": "prefers answers to this prompt to answers to another",
    }
    for key, name in names.items():
        if key in before or key in after:
            rows.append([name, number(before.get(key)), number(after.get(key))])
    print_table(["", "untrained", "trained"], rows, right=["untrained", "trained"])
    attacks = ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in judge.get("attacks", {}).items())
    print(f"  Attacks score: {attacks or '-'}.")


def _where(folder: RunFolder, command: str, reference: str) -> None:
    print()
    print(f"Run folder: {folder.path}")
    print("Next:")
    hints = {
        f"{command} show {reference} --step 1": "rubrics and answers of a step, with their scores",
        f"{command} ui": "charts of this run in MLflow",
        f"{command} train run.seed=1": "another seed",
    }
    width = max(map(len, hints))
    for words, what in hints.items():
        print(f"  {words:{width}}  {what}")

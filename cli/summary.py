"""The end of a run, for people: what happened, what rose and what did not, and what it may be taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from racelab.cli.console import print_table

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder


def print_summary(
    summary: Mapping[str, Any], end: Mapping[str, Any], folder: RunFolder, reference: str
) -> None:
    """Prints `analysis.summary.summarise`'s dict; `reference` is what to type for the run."""
    print()
    print(f"Run {summary['name']} ({summary['run_id']}) has finished.")
    _what_happened(summary, end)
    _learning(summary)
    _rubric_role(summary)
    _judge(summary)
    _where(folder, reference)


def number(value: object, digits: int = 2) -> str:
    """A number, or `-` where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _what_happened(summary: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    steps, routes = summary["steps"], summary["routes"]
    resumed = " (the last attempt)" if end["attempts"] > 1 else ""
    print(
        f"  {steps['policy']} policy and {steps['rubric']} rubric updates; "
        f"{end['wall_s'] / 60:.1f} min, peak memory {end['peak_gib']:.1f} GiB{resumed}."
    )
    phases = [f"{p['kind']} {p['length']} ({p['end_reason']})" for p in summary["phases"]]
    print(f"  Phases: {', '.join(phases) or 'none ended'}.")
    print(f"  Groups: {', '.join(f'{v} {k.replace(chr(95), chr(45))}' for k, v in routes.items())}.")
    print(
        f"  Quarantine rate {number(summary['quarantine_rate'])}; advantage collapse (all rewards equal) "
        f"{number(summary['collapse_rate'])} of the groups."
    )
    health = summary["health"]
    if health["deferred_switches"]:
        print(f"  {health['deferred_switches']} switches were deferred for want of pool entries.")
    if health["trqc_first_saturated"]:
        print(
            f"  TRQC was held at a bound in {health['trqc_saturated_steps']} steps, "
            f"first at {health['trqc_first_saturated']}."
        )
    if health["nonfinite"]:
        print(f"  WARNING: values that are not finite: {', '.join(health['nonfinite'])}.")
    if health["cost_mismatch"]:
        print(
            f"  WARNING: {health['cost_mismatch']} model-call counts differ from what follows from the steps."
        )


def _interval(cell: Mapping[str, Any]) -> str:
    if cell["difference"] is None:
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
        cell = summary["validation"][key]
        rows.append([name, number(cell["before"]), number(cell["after"]), _interval(cell), str(cell["n"])])
    print_table(["", "before", "after", "difference", "prompts"], rows, right=["before", "after", "prompts"])
    epochs = ", ".join(number(v) for v in summary["reward_by_epoch"])
    print(f"Judged training reward per epoch: {epochs}.")
    _sharpening(summary["sharpening"])


def _sharpening(control: Mapping[str, Any]) -> None:
    print()
    print("Is it only sharpening? Success by rule, untrained and trained model at the same temperatures")
    rows = [
        [
            f"{r['temperature']:g}",
            number(r["untrained_passed"]),
            number(r["trained_passed"]),
            _interval(r["paired"]),
            number(r["untrained_judged"]),
            number(r["trained_judged"]),
        ]
        for r in control["rows"]
    ]
    columns = ["temperature", "untrained", "trained", "difference", "judged untrained", "judged trained"]
    print_table(columns, rows, right=columns)
    beyond = control["beyond"]
    if beyond is None or beyond["difference"] is None:
        return
    best = control["best_untrained_temperature"]
    verdict = "inside the noise"
    if beyond["low"] > 0:
        verdict = "beyond sharpening"
    elif beyond["high"] < 0:
        verdict = "below what a lower temperature gives for free"
    print(
        f"Trained as trained against the untrained model at its best temperature ({best:g}): {_interval(beyond)}: "
        f"{verdict}."
    )


def _rubric_role(summary: Mapping[str, Any]) -> None:
    updates, rubrics = summary["rubric_updates"], summary["rubrics"]
    print()
    print("Rubric role")
    if updates["reward"]:
        print(
            f"  Rubric reward per update {_series(updates['reward'])}; margin gained over the old rubric "
            f"{_series(updates['gain'], 3)}."
        )
        print(
            f"  Entries with a margin above 0: {number(updates['positive_margin_frac'])} of {updates['entries']}."
        )
    rows = []
    for label in ("untrained", "trained"):
        r = rubrics[label]
        keys = ("usable_frac", "n_criteria", "grounded_frac", "specific_frac", "distinct_frac")
        rows.append([label, *(number(r[k]) for k in keys)])
    columns = ["", "usable", "criteria", "grounded", "specific", "distinct"]
    print_table(columns, rows, right=columns[1:])
    for text in rubrics["texts"]:
        print(f"  {text['prompt_id']}")
        print(f"    before: {_one_line(text['untrained'])}")
        print(f"    after:  {_one_line(text['trained'])}")


def _series(values: Sequence[float], digits: int = 2) -> str:
    return " ".join(number(v, digits) for v in values)


def _one_line(text: str, limit: int = 160) -> str:
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _judge(summary: Mapping[str, Any]) -> None:
    judge = summary["judge"]
    if not judge["before"]:
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
        if key in judge["before"] or key in judge["after"]:
            rows.append([name, number(judge["before"].get(key)), number(judge["after"].get(key))])
    print_table(["", "untrained", "trained"], rows, right=["untrained", "trained"])
    attacks = ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in judge["attacks"].items())
    print(f"  Attacks score: {attacks}.")


def _where(folder: RunFolder, reference: str) -> None:
    print()
    print(f"Run folder: {folder.path}")
    print("Next:")
    hints = {
        f"racelab show {reference} --step 1": "rubrics and answers of a step, with their scores",
        "racelab ui": "charts of this run in MLflow",
        "racelab train run.seed=1": "another seed",
    }
    width = max(map(len, hints))
    for command, what in hints.items():
        print(f"  {command:{width}}  {what}")

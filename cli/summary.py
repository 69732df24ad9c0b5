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
    if summary.get("family") == "rlds":
        from racelab.cli.summary_rlds import print_rlds

        print_rlds(summary, end)
        kept = int(summary["transcripts_every"])
        _where(folder, command, reference, kept if kept <= summary["steps"]["policy"] else None)
        return
    _what_happened(summary, end)
    _learning(summary)
    _rubric_role(summary)
    _probe(summary.get("probe", {}))
    _judge(summary)
    _costs(summary.get("costs", {}))
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
    for name, what in (("trqc", "TRQC"), ("switch", "The phase-length controller")):
        held = summary.get("saturated", {}).get(name, {})
        if held.get("held"):
            print(
                f"  {what} was held at a bound in {held['held']} of {held['adaptations']} adaptations, "
                f"first at step {held['first_step']}."
            )
    if health.get("nonfinite"):
        print(f"  WARNING: values that are not finite: {', '.join(health['nonfinite'])}.")


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
    updates = summary.get("rubric_updates", {})
    if not updates.get("reward"):
        return
    print()
    print("Rubric role")
    print(
        f"  Rubric reward, first and last third of {len(updates['reward'])} updates: {_thirds(updates['reward'])}."
    )
    if updates.get("gain"):
        print(f"  Margin gained over the rubric that failed, likewise: {_thirds(updates['gain'], 3)}.")
    if updates.get("entries"):
        print(
            f"  Pool entries used with a margin above 0: {updates.get('positive_margins', '-')} of "
            f"{updates['entries']}."
        )


_PROBE = {
    "rubrics that parse": "json_valid_frac",
    "criteria per rubric": "n_criteria_mean",
    "characters per criterion": "criterion_chars_mean",
    "criteria: labels only": "label_only_frac",
    "criteria: specific": "specific_frac",
    "criteria: constraints": "constraint_frac",
    "criteria: grounded": "grounded_frac",
    "criteria: distinct": "distinct_frac",
    "redundant rubrics": "redundant_frac",
    "groups with equal rewards": "sigma_zero_frac",
    "groups with all rewards ≥ 0.8": "all_ge_0_8_frac",
}


_OF_GROUPS = frozenset({"sigma_zero_frac", "all_ge_0_8_frac"})
"""Rates that depend on how many responses a group has."""


def _probe(probe: Mapping[str, Any]) -> None:
    found = probe.get("checkpoints", [])
    if not found:
        return
    print()
    print(f"Rubric probe ({number(found[-1].get('n_prompts'), 0)} fixed prompts)")
    size = found[-1].get("group_size")
    each = "" if size is None else f" ({number(size, 0)} responses each)"
    rows = [
        [
            name + each * (key in _OF_GROUPS),
            *(number(c.get(key), 0 if key == "criterion_chars_mean" else 2) for c in found),
        ]
        for name, key in _PROBE.items()
        if any(c.get(key) is not None for c in found)
    ]
    columns = [f"{c['checkpoint']} ({c['step']})" for c in found]
    print_table(["", *columns], rows, right=columns)
    for text in probe.get("texts", []):
        print(f"  {text['prompt_id']}")
        print(f"    first: {_one_line(text['first'])}")
        print(f"    last:  {_one_line(text['last'])}")


def _costs(costs: Mapping[str, Any]) -> None:
    calls = costs.get("calls", {})
    if not calls:
        return
    print()
    print("Model calls (printed: the papers' formulas; expected: what follows from the steps)")
    names = ("measured", "expected", "printed", "saved")
    rows = [[kind.replace("_", " "), *(_count(c.get(n)) for n in names)] for kind, c in calls.items()]
    print_table(["", *names], rows, right=names)
    if costs.get("mismatches"):
        steps = ", ".join(map(str, costs["mismatch_steps"][:_FEW]))
        print(f"  ERROR: {costs['mismatches']} counts differ from what is expected; first at steps {steps}.")


def _count(value: object) -> str:
    return "-" if value is None else f"{value:,}"


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


def _where(folder: RunFolder, command: str, reference: str, transcripts: int | None = None) -> None:
    """The folder and what to type next; `transcripts`: an update of an RLDS run whose texts were kept."""
    info = folder.info()
    rlds = info.get("paper") == "rlds"
    print()
    print(f"Run folder: {folder.path}")
    print("Next:")
    hints: dict[str, str] = {}
    if not rlds:
        hints[f"{command} show {reference} --step 1"] = "rubrics and answers of a step, with their scores"
    elif transcripts is not None:
        hints[f"{command} show {reference} --rollout {transcripts}"] = "rollouts of an update, turn by turn"
    hints[f"{command} ui"] = "charts of this run in MLflow"
    sweep = info.get("sweep")
    if sweep:
        hints[f"{command} show {sweep}"] = "the sweep that this run is a cell of"
    else:
        own = f"task={info['task']} condition={info['condition']} " if rlds else ""
        hints[f"{command} train {own}run.seed=1"] = "another seed"
    width = max(map(len, hints))
    for words, what in hints.items():
        print(f"  {words:{width}}  {what}")

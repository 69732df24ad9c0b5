"""`racelab show`: one run, or the rubrics, responses and scores of one of its steps; rollouts: `rollout_view.py`."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.analysis.transcript_text import ranges
from racelab.cli.console import number, on_terminal, print_json, print_table, seconds
from racelab.cli.runs import REWARD, local_time, method_name
from racelab.cli.summary import print_summary
from racelab.cli.train import command, one_run, reference, run_root
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.runfolder import RunFolder, read_json
from racelab.sweeps.manifest import resolve, run_info

if TYPE_CHECKING:
    import pandas as pd

_METRICS = (
    (REWARD, "reward, policy steps"),
    ("race/rubric_reward/mean", "reward, rubric steps"),
    ("race/route/informative_frac", "informative groups"),
    ("race/route/quarantine_rate", "quarantine rate"),
    ("race/signal/sigma_zero_frac", "groups with equal rewards"),
    ("race/trqc/q_ema", "q̂"),
    ("race/trqc/sigma_rt", "σ_rt"),
    ("race/trqc/tau_tie", "τ_tie"),
    ("race/switch/f_sat_ema", "f̂"),
    ("race/switch/tau_sat", "τ_sat"),
    ("race/switch/tau_imp", "τ_imp"),
    ("race/pool/size", "pool"),
    ("rlds/reflect/n_retries", "retries"),
    ("rlds/reflect/success_frac", "retries that beat their original"),
    ("rlds/parse/graded_frac", "gradings that could be read"),
    ("rlds/group/flat_frac", "groups with equal rewards"),
    ("rlds/group/mixed_frac", "groups with solved and unsolved"),
    ("rlds/stage1/sign_disagreement_rows", "rows whose subtasks disagree"),
    ("rlds/stage2/grpo_correlation", "correlation with GRPO"),
    ("rlds/stage3/token_adv_std", "std over the tokens of a row"),
    ("train/optim/kl", "KL"),
    ("perf/rollout/tokens_per_s", "tokens/s"),
    ("perf/time/step_s", "seconds a step"),
)
"""Metric -> how a person calls it; those that the run logged are shown."""


def show(
    run: str,
    step: int | None,
    rollout: str | None,
    html: Path | None,
    full: bool,
    root: Path | None,
    json_output: bool,
) -> int:
    """Prints a run, one step of it, a rollout, or the scores of an evaluation.

    Raises:
        ConfigError: options that do not go together.
    """
    if rollout is None and (html is not None or full):
        raise ConfigError(f"{'--html' if html else '--full'} is for a rollout; add --rollout STEP:GROUP:IDX")
    if rollout is not None and step is not None:
        raise ConfigError("--step and --rollout are two views of a step; leave one of them out")
    folder = resolve(run_root(str(root) if root else ""), run)
    if rollout is not None:
        from racelab.cli.rollout_view import show_rollout

        _refuse_eval(folder, "--rollout")
        return show_rollout(one_run(folder), rollout, html, full, json_output)
    if step is not None:
        _refuse_eval(folder, "--step")
        groups = step_groups(one_run(folder), step)
        if json_output:
            print_json({"run_id": folder.run_id, "step": step, "groups": groups})
        else:
            _print_step(folder, step, groups)
        return 0
    if run_info(folder).kind == "sweep":
        _show_sweep(folder, json_output)
        return 0
    if run_info(folder).kind == "eval":
        _show_eval(folder, json_output)
        return 0
    found = describe(folder)
    if json_output:
        print_json(found)
    else:
        _print_run(found)
        if found["summary"] and "end" in found["summary"]:
            print_summary(found["summary"], found["summary"]["end"], folder, command(), reference(folder))
    return 0


def _refuse_eval(folder: RunFolder, option: str) -> None:
    if folder.info().get("kind") == "eval":
        raise ConfigError(f"{folder.run_id} is an evaluation, it has no steps; leave {option} out")


def _show_eval(folder: RunFolder, json_output: bool) -> None:
    """The scores of an evaluation: those it ended with, else of the examples that are done."""
    from racelab.analysis.summary import stored_summary, summarise
    from racelab.cli.eval_view import print_scores

    info = run_info(folder)
    ended = stored_summary(folder) if info.status == "finished" else None
    summary = ended or summarise(folder)
    if json_output:
        print_json({**info.to_json(), "go_on": _go_on(folder), **summary})
        return
    subject = summary["subject"]
    checkpoint = (
        f", checkpoint of step {subject['checkpoint']}" if subject.get("checkpoint") is not None else ""
    )
    print(f"{info.name}  {info.run_id}")
    print(f"  status    {info.status}{f' ({info.reason})' if info.reason else ''}")
    print(f"  evaluates {subject.get('run_id') or subject.get('source')}{checkpoint}")
    print(f"  started   {local_time(info.started)}, attempts {len(folder.attempts())}")
    print(f"  folder    {info.path}\n")
    if summary["scores"]:
        print_scores(summary)
    else:
        print("No example is done yet.")
    if (go_on := _go_on(folder)) is not None:
        print(f"\nGo on with: {go_on}")


def _show_sweep(sweep: RunFolder, json_output: bool) -> None:
    """The cells of a sweep, as they stand now."""
    from racelab.cli.eval_view import print_eval_cells
    from racelab.cli.sweep import print_cells
    from racelab.cli.sweep_rlds import comparison, print_comparison
    from racelab.sweeps.record import means
    from racelab.sweeps.run import rows_of

    info, rows = run_info(sweep), rows_of(sweep)
    if json_output:
        cells = {"cells": rows, "means": means(rows), "comparison": comparison(sweep, draw=False)}
        print_json({**info.to_json(), **cells})
        return
    reason = f" ({info.reason})" if info.reason else ""
    print(f"{info.name}  {info.run_id}")
    print(f"  status    {info.status}{reason}")
    print(f"  started   {local_time(info.started)}")
    print(f"  command   {sweep.info().get('command')}")
    reused = sweep.info().get("reused_cells")
    if reused:
        print(f"  reused    {', '.join(reused)}: children of another sweep in MLflow")
    print(f"  folder    {info.path}\n")
    if any("scores" in row for row in rows):
        print_eval_cells(rows)
        return
    print_cells(rows, sweep.path.parent)
    compared = comparison(sweep, draw=False)
    if compared is not None:
        print_comparison(compared, sweep)


def describe(run: RunFolder) -> dict[str, Any]:
    """What is known of a run, as JSON values."""
    from racelab.analysis.load import load_metrics, load_table
    from racelab.analysis.summary import stored_summary
    from racelab.experiments.tracking.shipper import backlog

    metrics = load_metrics(run)
    phases = load_table(run, "phases")
    attempts = run.attempts()
    overrides = run.path / "config" / "overrides.json"
    return {
        **run_info(run).to_json(),
        "paper": str(run.info().get("paper") or "race"),
        "last_step": int(metrics.index.max()) if len(metrics.index) else 0,
        "seconds": _total(metrics, "perf/time/step_s"),
        "go_on": _go_on(run),
        "attempts": attempts,
        "overrides": read_json(overrides) if overrides.is_file() else [],
        "phases": _records(phases, ["index", "kind", "start", "end", "length", "end_reason"]),
        "metrics": {name: _course(metrics, name) for name, _ in _METRICS if name in metrics.columns},
        "records_waiting": backlog(run),
        "summary": stored_summary(run),
    }


def _go_on(run: RunFolder) -> str | None:
    """The command that goes on with a run that has ended unfinished: that of its sweep where it is a cell of one."""
    if run.status() not in ("interrupted", "stale", "failed"):
        return None
    sweep = run.path.parent / str(run.info().get("sweep") or "")
    if run.info().get("sweep") and (sweep / "run.json").is_file():
        return str(RunFolder.open(sweep).info().get("command"))
    verb = "eval" if run.info().get("kind") == "eval" else "train"
    return f"{command()} {verb} --resume {reference(run)}"


def step_groups(run: RunFolder, step: int) -> list[dict[str, Any]]:
    """The groups of a step: prompt, rubric, routing, and each sample with its score, in order.

    Raises:
        DataError: no text of that step was kept.
    """
    from racelab.analysis.load import load_table

    samples = load_table(run, "samples")
    at = samples[samples["step"] == step]
    if at.empty and run.info().get("paper") == "rlds":
        raise DataError(
            f"run {run.run_id} is an RLDS run: its texts are rollouts; `racelab show {run.run_id} --rollout {step}` "
            "lists those of the step"
        )
    if at.empty:
        kept = sorted({int(s) for s in samples["step"].dropna()})
        there = f"texts were kept of steps {ranges(kept)}" if kept else "it kept no texts at all"
        raise DataError(f"run {run.run_id} has no texts of step {step}; {there} (run.samples_every)")
    routed = load_table(run, "groups")
    routing = _records(
        routed[routed["step"] == step],
        ["prompt_id", "route", "mean", "std", "tie_rate", "d_tri", "d_emb", "sigma_rt", "tau_tie"],
    )
    found = []
    for number_of_group, rows in at.groupby("group", sort=True):
        index = int(str(number_of_group))
        records = _records(rows.sort_values("idx"), ["idx", "role", "prompt", "text", "rubric_text", "score"])
        role = str(records[0]["role"])
        has_routing = role == "policy" and index < len(routing)
        found.append(
            {
                "group": index,
                "role": role,
                "prompt": records[0]["prompt"],
                "rubric": records[0]["rubric_text"] if role == "policy" else None,
                "routing": routing[index] if has_routing else None,
                "samples": [{key: row[key] for key in ("idx", "text", "score")} for row in records],
            }
        )
    return found


def _records(frame: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows as plain values; columns that are not there are left out."""
    present = [column for column in columns if column in frame.columns]
    return [
        {name: _plain(value) for name, value in zip(present, row, strict=True)}
        for row in frame[present].itertuples(index=False, name=None)
    ]


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own; NaN and missing values as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _total(metrics: pd.DataFrame, name: str) -> float | None:
    return float(metrics[name].sum()) if name in metrics.columns else None


def _course(metrics: pd.DataFrame, name: str) -> dict[str, float]:
    """First, last, least and largest of a metric over the steps that logged it."""
    values = metrics[name].dropna()
    return {
        "first": float(values.iloc[0]),
        "last": float(values.iloc[-1]),
        "min": float(values.min()),
        "max": float(values.max()),
    }


def _print_run(found: Mapping[str, Any]) -> None:
    reason = f" ({found['reason']})" if found["reason"] else ""
    what = (found["task"], found["condition"]) if found["task"] else (found["method"], found["variant"])
    name = "/".join(word for word in what if word)
    print(f"{found['name']}  {found['run_id']}")
    print(f"  status    {found['status']}{reason}")
    print(f"  method    {name}, seed {found['seed']}")
    print(f"  started   {local_time(found['started'])}, attempts {len(found['attempts'])}")
    of, again = ("updates", "update") if found["paper"] == "rlds" else ("steps", "step")
    all_of = " (all attempts)" if len(found["attempts"]) > 1 else ""
    print(f"  {again:<9} {found['last_step']}, {seconds(found['seconds'])} in {of}{all_of}")
    print(f"  folder    {found['path']}")
    print(f"  overrides {' '.join(found['overrides']) or 'none'}")
    mlflow = found["mlflow_run_id"] or "not there yet"
    n = found["records_waiting"]
    waiting = f", {n} {'record waits' if n == 1 else 'records wait'} (racelab sync)" if n else ""
    print(f"  mlflow    {mlflow}{waiting}")
    if found["phases"]:
        print("\nPhases")
        columns = ["index", "kind", "start", "end", "length", "end_reason"]
        rows = [[str(phase.get(column, "-")) for column in columns] for phase in found["phases"]]
        print_table(columns, rows, right=["index", "start", "end", "length"])
    if found["metrics"]:
        print("\nMetrics")
        rows = [
            [label, *(number(found["metrics"][name][k]) for k in ("first", "last", "min", "max")), name]
            for name, label in _METRICS
            if name in found["metrics"]
        ]
        print_table(["", "first", "last", "min", "max", "name"], rows, right=["first", "last", "min", "max"])
    texts, option = ("Rollouts", "--rollout STEP") if found["paper"] == "rlds" else ("Texts", "--step N")
    if found["last_step"] or not found["go_on"]:
        print(f"\n{texts} of a step: racelab show {found['run_id']} {option}")
    if found["go_on"]:
        print(f"\nGo on with: {found['go_on']}")


def _print_step(run: RunFolder, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
    info = run_info(run)
    print(f"{info.name}  {run.run_id}  {method_name(info)}  step {step}")
    for group in groups:
        kind = "candidate rubrics" if group["role"] == "rubric" else "responses"
        print(f"\nGroup {group['group']}: {len(group['samples'])} {kind}")
        _block("prompt", str(group["prompt"]))
        if group["rubric"]:
            _block("rubric", str(group["rubric"]))
        routing = group["routing"]
        if routing:
            values = "  ".join(
                f"{label} {number(routing.get(key))}"
                for label, key in (("mean", "mean"), ("σ", "std"), ("ties", "tie_rate"), ("d_tri", "d_tri"))
            )
            _block("route", f"{routing.get('route')}  {values}")
        for sample in group["samples"]:
            _block(number(sample["score"]), str(sample["text"]).strip() or "(nothing)")


def _block(label: str, text: str) -> None:
    """A label and a text, wrapped under each other on a terminal, one line for each of the text's off it."""
    width = max(40, shutil.get_terminal_size().columns - 12) if on_terminal() else 10**6
    lines = [part for line in text.splitlines() or [""] for part in (textwrap.wrap(line, width) or [""])]
    print(f"  {label:>7}  {lines[0]}")
    for line in lines[1:]:
        print(f"  {'':>7}  {line}")

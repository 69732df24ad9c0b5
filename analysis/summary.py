"""What happened in a run of any RACE method, from its spool: numbers first, each with what it may be taken for.

RLDS runs and evaluations have summaries of their own (rlds_summary.py, eval_summary.py), made from here too.

Everything is a plain dict of JSON values, so that the terminal, `--json` and the report show the same numbers.
Differences come with 95 % intervals of a paired bootstrap over held-out prompts (samples of a prompt averaged
first); an interval is printed whatever its sign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from racelab.analysis.stats import paired_bootstrap
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import AnyConfig, RldsRunConfig
from racelab.experiments.methods.ledger import KINDS
from racelab.experiments.probe import RECTANGLE
from racelab.experiments.rng import numpy_generator
from racelab.experiments.runfolder import RunFolder, read_json
from racelab.experiments.tracking.spool import read_spool

Row = Mapping[str, Any]
UNTRAINED, TRAINED = "untrained", "trained"


def summarise(folder: RunFolder) -> dict[str, Any]:
    """The whole summary of a run that has finished, or of what there is of it."""
    checked = _config(folder)
    if isinstance(checked, RldsRunConfig):
        from racelab.analysis.rlds_summary import summarise_rlds

        return summarise_rlds(folder, checked)
    if isinstance(checked, EvalRunConfig):
        from racelab.analysis.eval_summary import summarise_eval

        return summarise_eval(folder, checked)
    config = checked.model_dump()
    metrics, tables = _read(folder)
    info = folder.info()
    policy = [m for m in metrics if m.get("train/clock/phase_kind") == 0.0]
    rubric = [m for m in metrics if m.get("train/clock/phase_kind") == 1.0]
    phases = sorted(tables.get("phases", []), key=lambda r: int(r["index"]))
    seed = int(info["seed"] or 0)
    samples = tables.get("val_examples", [])
    return {
        "run_id": folder.run_id,
        "name": info["name"],
        "path": str(folder.path),
        "steps": {"policy": len(policy), "rubric": len(rubric)},
        "seconds": {
            k: _total(metrics, f"perf/time/{k}")
            for k in ("step_s", "gen_s", "judge_s", "train_s", "validate_s")
        },
        "phases": [{k: p[k] for k in ("index", "kind", "length", "end_reason")} for p in phases],
        "routes": _routes(tables.get("groups", [])),
        "quarantine_rate": _mean(policy, "race/route/quarantine_rate"),
        "collapse_rate": _mean(policy, "race/signal/sigma_zero_frac"),
        "reward_by_epoch": _by_epoch(
            tables.get("groups", []), config["method"]["prompts_per_step"], _train_prompts(folder)
        ),
        "rubric_updates": _rubric_updates(rubric, tables.get("rubric_groups", [])),
        "validation": _validation(samples, config, seed),
        "sharpening": _sharpening(samples, config, seed),
        "probe": _probe(metrics, tables.get("rubric_probe", [])),
        "judge": _judge(metrics),
        "saturated": windup(metrics, config["method"]),
        "costs": _costs(metrics),
        "health": _health(metrics),
    }


def _read(folder: RunFolder) -> tuple[list[dict[str, float]], dict[str, list[dict[str, Any]]]]:
    """Metrics by step (ascending) and rows by table."""
    steps: dict[int, dict[str, float]] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    for record in read_spool(folder):
        if record["kind"] == "metrics":
            steps.setdefault(int(record["step"]), {}).update(record["values"])
        elif record["kind"] == "rows":
            tables.setdefault(record["table"], []).extend(
                {"step": record["step"], **row} for row in record["rows"]
            )
    return [{"step": float(step), **values} for step, values in sorted(steps.items())], tables


def _config(folder: RunFolder) -> AnyConfig:
    from racelab.configs.compose import read_composed

    return read_composed(folder.path / "config" / "composed.yaml", to_look=True).config


def _train_prompts(folder: RunFolder) -> int:
    """How many training prompts the run had."""
    return len(read_json(folder.path / "setup.json")["train_ids"])


def _values(metrics: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [m[name] for m in metrics if name in m]


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = _values(metrics, name)
    return sum(values) / len(values) if values else None


def _total(metrics: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(_values(metrics, name))


def _routes(groups: Sequence[Row]) -> dict[str, int]:
    names = ("informative", "diversity_collapsed", "rubric_failed", "invalid")
    found = Counter(str(g["route"]) for g in groups)
    return {name: found[name] for name in names}


def _by_epoch(groups: Sequence[Row], n: int, n_train: int) -> list[float]:
    """Mean judged reward per pass over the `n_train` training prompts, taken `n` a step.

    Single steps swing with the prompts that they hold. A step that crosses the border counts in the earlier pass.
    """
    epochs: dict[int, list[float]] = {}
    for g in groups:
        rewards = [r for r in g["rewards"] if r is not None]
        epochs.setdefault((int(g["policy_step"]) - 1) * n // n_train, []).extend(rewards)
    return [sum(r) / len(r) for _, r in sorted(epochs.items()) if r]


def _rubric_updates(rubric: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> dict[str, Any]:
    margins = [float(r["m_old"]) for r in rows if r.get("m_old") is not None]
    return {
        "reward": _values(rubric, "race/rubric_reward/mean"),
        "gain": _values(rubric, "race/rubric_reward/gain_mean"),
        "usable_frac": [1.0 - v for v in _values(rubric, "race/rubric_reward/unusable_frac")],
        "entries": len(margins),
        "positive_margin_frac": sum(m > 0.0 for m in margins) / len(margins) if margins else None,
        "positive_margins": sum(m > 0.0 for m in margins),
    }


def _cells(samples: Sequence[Row], label: str, temperature: float, column: str) -> dict[str, float]:
    """Prompt -> mean over its samples."""
    found: dict[str, list[float]] = {}
    for row in samples:
        if row["model"] == label and row["temperature"] == temperature and row[column] is not None:
            found.setdefault(str(row["example_id"]), []).append(float(row[column]))
    return {key: sum(v) / len(v) for key, v in found.items()}


def _paired(before: Mapping[str, float], after: Mapping[str, float], n: int, seed: int) -> dict[str, Any]:
    """Mean before, mean after, difference with its interval, over the prompts that both have."""
    keys = sorted(before.keys() & after.keys())
    if not keys:
        return {"n": 0, "before": None, "after": None, "difference": None, "low": None, "high": None}
    a, b = (np.array([cells[k] for k in keys]) for cells in (before, after))
    found = paired_bootstrap(b, a, numpy_generator(seed, "summary"), replicates=n)  # same data, same interval
    return {
        "n": len(keys),
        "before": found.mean_b,
        "after": found.mean_a,
        "difference": found.difference.value,
        "low": found.difference.low,
        "high": found.difference.high,
    }


def _validation(samples: Sequence[Row], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Judged reward and success by rule on held-out prompts, at the training temperature."""
    first, n = config["validation"]["temperatures"][0], config["validation"]["bootstrap"]
    return {
        name: _paired(
            _cells(samples, UNTRAINED, first, column), _cells(samples, TRAINED, first, column), n, seed
        )
        for name, column in (("judged_reward", "reward"), ("rule_success", "passed"), ("ended", "finished"))
    }


def _sharpening(samples: Sequence[Row], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Success by rule at every temperature, and the trained model against the best untrained temperature."""
    temperatures, n = config["validation"]["temperatures"], config["validation"]["bootstrap"]
    rows = []
    for t in temperatures:
        row: dict[str, Any] = {"temperature": t}
        for label in (UNTRAINED, TRAINED):
            for name, column in (("judged", "reward"), ("passed", "passed")):
                cells = _cells(samples, label, t, column)
                row[f"{label}_{name}"] = sum(cells.values()) / len(cells) if cells else None
        row["paired"] = _paired(
            _cells(samples, UNTRAINED, t, "passed"), _cells(samples, TRAINED, t, "passed"), n, seed
        )
        rows.append(row)
    seen = [r for r in rows if r["untrained_passed"] is not None]
    if not seen:
        return {"rows": rows, "best_untrained_temperature": None, "beyond": None}
    best = max(seen, key=lambda r: float(r["untrained_passed"]))["temperature"]
    beyond = _paired(
        _cells(samples, UNTRAINED, best, "passed"),
        _cells(samples, TRAINED, temperatures[0], "passed"),
        n,
        seed,
    )
    return {"rows": rows, "best_untrained_temperature": best, "beyond": beyond}


def _probe(metrics: Sequence[Mapping[str, float]], rows: Sequence[Row]) -> dict[str, Any]:
    """The rubric probe at each checkpoint (Tables 1, 11, 13) and a few texts of the first and the last (Table 10)."""
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"]), []).append(row)
    checkpoints = []
    for m in metrics:
        found = {k.removeprefix("race/probe/"): v for k, v in m.items() if k.startswith("race/probe/")}
        if found:
            mine = by_step.get(int(m["step"]), [])
            criteria = [str(r["criterion"]) for r in mine if r.get("criterion") is not None]
            checkpoints.append(
                {
                    "checkpoint": str(mine[0]["checkpoint"]) if mine else "",
                    "step": int(m["step"]),
                    **found,
                    "distinct_frac": len(set(criteria)) / len(criteria) if criteria else None,
                }
            )
    return {"checkpoints": checkpoints, "texts": _first_and_last([by_step[k] for k in sorted(by_step)])}


def _first_and_last(probes: Sequence[Sequence[Row]]) -> list[dict[str, str]]:
    """The rubrics of three prompts as first and as last written, the rectangle prompt of Table 10 first."""
    if len(probes) < 2:
        return []
    first, last = ({str(r["prompt_id"]): str(r["text"]) for r in rows} for rows in (probes[0], probes[-1]))
    shared = sorted(first.keys() & last.keys(), key=lambda k: (k != RECTANGLE, k))
    return [{"prompt_id": k, "first": first[k], "last": last[k]} for k in shared[:3]]


def _judge(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """AUCs and attack scores: `before` on untrained, `after` on trained responses."""
    seen = [
        {k.removeprefix("race/judge/"): v for k, v in m.items() if k.startswith("race/judge/")}
        for m in metrics
    ]
    found = [s for s in seen if s]
    before = found[0] if found else {}
    return {
        "before": {k: v for k, v in before.items() if not k.startswith("attack_")},
        "after": found[-1] if len(found) > 1 else {},
        "attacks": {k.removeprefix("attack_"): v for k, v in before.items() if k.startswith("attack_")},
    }


def _health(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    names = {k for m in metrics for k in m if k.startswith("health/nonfinite/")}
    return {
        "judge_parse_failures": int(_total(metrics, "health/judge_parse_fail")),
        "judge_infra_failures": int(_total(metrics, "health/judge_infra_fail")),
        "cost_mismatch": int(_total(metrics, "health/cost_mismatch")),
        "deferred_switches": int(_total(metrics, "race/switch/deferred_switch")),
        "nonfinite": sorted(names),
    }


def windup(metrics: Sequence[Mapping[str, float]], method: Mapping[str, Any]) -> dict[str, Any]:
    """The anti-windup audit of both controllers."""
    trqc, phase = method.get("trqc", {}), method.get("phase", {})
    adapts = any(trqc.get(eta, 0.0) > 0.0 for eta in ("eta_sigma", "eta_tau"))
    first = trqc.get("calibrate_steps", 0) + 1
    # a step without a quarantine rate changes no threshold, and a length error is there only if tau is updated
    updates = [
        m
        for m in metrics
        if adapts and "race/route/quarantine_rate" in m and m.get("train/clock/policy_step", 0.0) >= first
    ]
    lengths = [
        m
        for m in metrics
        if any(
            f"race/switch/err_{k}_len" in m and phase.get(f"eta_{k}", 0.0) > 0.0 for k in ("policy", "rubric")
        )
    ]
    return {
        "trqc": _held(updates, "race/trqc/saturated"),
        "switch": _held(lengths, "race/switch/saturated"),
    }


def _held(adapted: Sequence[Mapping[str, float]], name: str) -> dict[str, int | None]:
    """Of the steps in which a controller adapted: how many, how many held at a bound, and the first of these."""
    steps = [int(m["step"]) for m in adapted if m.get(name) == 1.0]
    return {
        "adaptations": len(_values(adapted, name)),
        "held": len(steps),
        "first_step": steps[0] if steps else None,
    }


def _costs(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Model calls of the whole run by kind: made, as they follow from the steps, as the papers' formulas have them.

    `saved` is printed less measured over the steps that have a printed formula (below 0: more calls than printed), None
    where none has. Rubric-ARM's first stage has none, so its calls are in `measured` alone.
    """
    calls: dict[str, dict[str, int | None]] = {}
    for kind in KINDS:
        name = f"cost/calls/{kind}"
        if not _values(metrics, name):
            continue
        measured, expected = int(_total(metrics, name)), int(_total(metrics, f"{name}_expected"))
        covered = [m for m in metrics if f"{name}_printed" in m]
        printed = int(_total(covered, f"{name}_printed")) if covered else None
        calls[kind] = {
            "measured": measured,
            "expected": expected,
            "printed": printed,
            "saved": None if printed is None else printed - int(_total(covered, name)),
        }
    return {
        "calls": calls,
        "mismatches": int(_total(metrics, "health/cost_mismatch")),
        "mismatch_steps": [int(m["step"]) for m in metrics if m.get("health/cost_mismatch", 0.0) > 0.0],
    }


def stored_summary(folder: RunFolder) -> dict[str, Any] | None:
    """`summary.json` of a finished run, None if there is none."""
    path = folder.path / "summary.json"
    found: dict[str, Any] | None = read_json(path) if path.exists() else None
    if found is not None and found.get("family") == "eval":
        from racelab.experiments.evaluation.totals import in_order

        found["scores"] = {label: found["scores"][label] for label in in_order(found["scores"])}
    return found

"""`racelab replay`: what the controllers would have decided on a run's log, with its own settings or with others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.cli.console import number, print_json, print_table, say
from racelab.cli.train import one_run, run_root
from racelab.configs import schema
from racelab.configs.compose import read_composed
from racelab.configs.keys import leaf_keys
from racelab.configs.messages import Messages, shown
from racelab.configs.suggest import did_you_mean, near_keys
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.manifest import resolve

if TYPE_CHECKING:
    from racelab.analysis.replay import Replayed
    from racelab.analysis.replay_log import Log

SECTIONS = ("routing", "trqc", "phase", "pool")
"""Blocks of `method` that a replay can change."""
_CONTROLLER = ("trqc", "phase", "routing")
"""Where `controller.KEY` is looked up, in this order."""
_NOTES = {
    "method.routing.mask_uninformative": "decides what is trained on, not how groups are routed",
}
"""Keys of these blocks that no decision depends on."""
_ENDS = {
    "budget": "the run's budget is used up",
    "log": "every step of the log is used",
    "policy": "the log has no further policy step",
    "rubric": "the log has no further rubric step",
}


def replay(
    run: str,
    changes: Sequence[str],
    plot: Path | None,
    no_plot: bool,
    root: Path | None,
    json_output: bool,
) -> int:
    """Replays a run and prints, and draws, what would have been decided."""
    from racelab.analysis.replay import replay as run_controllers
    from racelab.analysis.replay_diff import to_json
    from racelab.analysis.replay_log import integrity, load_log

    if plot and no_plot:
        raise ConfigError("--plot FILE and --no-plot exclude one another; leave one out")
    folder = one_run(resolve(run_root(str(root) if root else ""), run))
    own = _config(folder)
    race = _race(own, folder)
    values = parse(changes)
    other = _race(changed(own, values), folder)
    eps_tie = race.routing.eps_tie
    log = load_log(folder)
    replayed = run_controllers(log, other, own.run, eps_tie)
    result: dict[str, Any] = {
        "run_id": folder.run_id,
        "set": values,
        "notes": [f"{key} {_NOTES[key]}: the replay is the same" for key in values if key in _NOTES],
        "integrity": integrity(log, eps_tie),
        **to_json(log, replayed),
        "plot": None,
    }
    if not no_plot:
        file = plot or folder.path / "replay" / "replay.png"
        _draw(log, replayed, (race.trqc.q_target, other.trqc.q_target), folder, values, file)
        result["plot"] = str(file)
    for note in result["notes"]:
        say(note)
    if json_output:
        print_json(result)
    else:
        _print(result)
    return 0


def _config(folder: RunFolder) -> schema.Config:
    """The run's config. The method is asked for first: a run of another one may be of another schema, too."""
    method = str(folder.info().get("method") or "race")
    if method != "race":
        raise _no_race(folder, method)
    return read_composed(folder.path / "config" / "composed.yaml", to_look=True).race


def _race(config: schema.Config, folder: RunFolder) -> schema.RaceConfig:
    if not isinstance(config.method, schema.RaceConfig):
        raise _no_race(folder, str(config.method.name))
    return config.method


def _no_race(folder: RunFolder, method: str) -> ConfigError:
    return ConfigError(
        f"run {folder.run_id} is of method {method}; only RACE has controllers to replay: name a run of method race"
    )


def replayable() -> list[str]:
    """The keys that `--set` takes, in full."""
    heads = tuple(f"method.{section}." for section in SECTIONS)
    return [key for key in leaf_keys() if key.startswith(heads)]


def parse(changes: Sequence[str]) -> dict[str, Any]:
    """Full key -> value, from words as `q_target=0.35`.

    Raises:
        ConfigError: a word that is no KEY=VALUE, or a key that is unknown, ambiguous or cannot be replayed.
    """
    found: dict[str, Any] = {}
    for word in changes:
        key, equals, text = word.partition("=")
        if not key or not equals or not text:
            raise ConfigError(f"{word!r}: not a setting; write KEY=VALUE, e.g. trqc.q_target=0.35")
        found[full_key(key)] = _value(word, text)
    return found


def full_key(key: str) -> str:
    """The config key that a word of `--set` means.

    Raises:
        ConfigError: none, several, or one that a replay cannot change.
    """
    known = replayable()
    if key in known or f"method.{key}" in known:
        return key if key in known else f"method.{key}"
    prefix, _, last = key.partition(".")
    if prefix == "controller":
        hits = [f"method.{s}.{last}" for s in _CONTROLLER if f"method.{s}.{last}" in known][:1]
    else:
        hits = [name for name in known if name.rpartition(".")[2] == key]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise ConfigError(f"{key}: stands for {' and '.join(hits)}; write one of them in full")
    others = [name for name in leaf_keys() if name not in known and (name == key or name.endswith(f".{key}"))]
    if others:
        raise ConfigError(
            f"{key}: cannot be replayed, responses and rewards are those of the log; what can be set are the keys of "
            f"{', '.join(f'method.{section}' for section in SECTIONS)}"
        )
    raise ConfigError(f"{key}: no such key{did_you_mean(near_keys(last or key, known)) or _list(known)}")


def _list(known: Sequence[str]) -> str:
    return f"; take a key of {', '.join(dict.fromkeys(key.rpartition('.')[0] for key in known))}"


def _value(word: str, text: str) -> Any:
    """A value as YAML reads it, but `on`, `off`, `yes` and `no` stay words."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{word}: the value cannot be read; a list is written [1,2]") from error
    return text if isinstance(value, bool) and text.lower() not in ("true", "false") else value


def changed(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
    """The config with other values, checked as every config is.

    Raises:
        ConfigError: a line for each value that the schema refuses.
    """
    from pydantic import ValidationError

    if not values:
        return config
    raw = config.model_dump()
    for key, value in values.items():
        section, _, name = key.removeprefix("method.").partition(".")
        raw["method"][section][name] = value
    try:
        result = schema.Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(Messages(typed=frozenset(values)).lines(error.errors()))) from error
    odd = list(_odd(values, result.model_dump()["method"]))
    if odd:
        raise ConfigError("\n".join(odd))
    return result


def _odd(values: Mapping[str, Any], method: Mapping[str, Any]) -> Iterator[str]:
    """What pydantic takes and nobody can mean: infinities, and `true` for 1."""
    for key, value in values.items():
        section, _, name = key.removeprefix("method.").partition(".")
        after = method[section][name]
        if any(
            isinstance(v, float) and not math.isfinite(v)
            for v in (after if isinstance(after, tuple) else (after,))
        ):
            yield f"{key}={shown(value)}: must be a finite number"
        elif isinstance(value, bool) and not isinstance(after, bool):
            yield f"{key}={shown(value)}: must be a number, not true or false"


def _draw(
    log: Log,
    replayed: Replayed,
    q_target: tuple[float, float],
    folder: RunFolder,
    values: Mapping[str, Any],
    file: Path,
) -> None:
    from racelab.analysis.replay_plot import plot

    lines = [f"Run {folder.run_id}, replayed with {'its own settings' if not values else ''}".rstrip()]
    words = [f"{key.removeprefix('method.')}={shown(value)}" for key, value in values.items()]
    lines += [",  ".join(words[i : i + 4]) for i in range(0, len(words), 4)]
    plot(log, replayed, q_target, "\n".join(lines), file)


def _print(result: Mapping[str, Any]) -> None:
    settings = ", ".join(f"{key}={shown(value)}" for key, value in result["set"].items())
    print(f"Run {result['run_id']}, replayed with {settings or 'its own settings'}")
    _print_phases(result["phases"]["logged"], result["phases"]["replayed"])
    _print_values(result)
    used = len(result["steps"])
    left = " and ".join(f"{n} {kind}" for kind, n in result["unused"].items() if n)
    print(f"\n{used} steps replayed; {_ENDS[result['end']]}{f' ({left} steps unused)' if left else ''}.")
    _print_verdict(result)
    if result["plot"]:
        print(f"Plot: {result['plot']}")


def _print_phases(logged: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> None:
    def cells(rows: Sequence[Mapping[str, Any]], index: int) -> list[str]:
        if index >= len(rows):
            return ["-", "-", "-"]
        row = rows[index]
        return [str(row["kind"]), f"{row['start']}-{row['end']}", str(row["end_reason"])]

    print("\nPhases")
    columns = ["phase", "logged", "steps", "ended by", "replayed", "steps ", "ended by "]
    rows = [[str(i), *cells(logged, i), *cells(ours, i)] for i in range(max(len(logged), len(ours)))]
    print_table(columns, rows, right=["phase", "steps", "steps "])


def _print_values(result: Mapping[str, Any]) -> None:
    print("\nGroups by route, and thresholds at the end")
    routes = result["routes"]
    rows = [
        [name.replace("_", "-"), number(routes["logged"].get(name)), number(count)]
        for name, count in routes["replayed"].items()
    ]
    rows += [
        [name, number(pair["logged"], 6), number(pair["replayed"], 6)]
        for name, pair in result["thresholds"].items()
    ]
    print_table(["", "logged", "replayed"], rows, right=["logged", "replayed"])


def _print_verdict(result: Mapping[str, Any]) -> None:
    found = result["differences"]
    if not found and result["set"]:
        print(
            "No difference: with these settings every decision and threshold would have been the same. "
            "A target decides nothing where its gains are 0 or the mode is another one."
        )
    elif not found:
        print("No difference: every logged decision and threshold comes out again, to 1e-12.")
    else:
        first = found[0]
        group = f" of group {first['group']}" if first["group"] is not None else ""
        count = "1 difference" if len(found) == 1 else f"{len(found):,} differences"
        print(
            f"{count}; first at step {first['step']}: {first['what']}{group}, "
            f"logged {_exact(first['logged'])}, replayed {_exact(first['replayed'])}."
        )
        if result["set"]:
            print("Responses and rewards are the log's, also after the first other route or phase.")
        else:
            print("The settings are the run's own, so the log was changed or written by another version.")
    parted = result["counterfactual_from"]
    if parted is not None:
        print(
            f"Counterfactual from step {parted} on: the phases differ, and each step takes the log's next unused one "
            "of its kind; another phase would have trained something else."
        )
    for name, count in result["integrity"].items():
        if count:
            print(f"WARNING: {count:,} groups log another {name} than their rewards give.")


def _exact(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value:.12g}" if isinstance(value, float) else str(value)

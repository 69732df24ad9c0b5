"""`racelab config show | diff | check`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.cli.console import console, on_terminal, print_json, print_table, say
from racelab.configs.compose import Composed, compose, read_composed
from racelab.configs.keys import CONFIG_DIR, groups, leaf_keys
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import AnyConfig
from racelab.configs.suggest import by_tail, did_you_mean, near, near_keys
from racelab.experiments.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from racelab.configs.sources import Source

_COMMAND_LINE = "command line"


def show(
    words: Sequence[str],
    source: bool,
    explain: str | None,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Prints a config: as YAML, with the origin of every value, or one key explained.

    Args:
        words: overrides; or one word for what `diff` takes too, a preset or a run.
        source: name the places.
        explain: the key; None: all.
        config_dirs: the user's folders.
        json_output: JSON on stdout.
    """
    composed = _asked(words, config_dirs)
    if source and not composed.choices:
        raise ConfigError(
            f"{words[0]}: a run keeps its values, not where each was set; leave --source out (racelab config diff A B "
            "shows what differs, and why)"
        )
    if explain is not None:
        _explain(composed, explain, json_output)
    elif source:
        _show_sources(composed, json_output)
    elif json_output:
        print_json(composed.config.model_dump(mode="json"))
    elif on_terminal():
        from rich.syntax import Syntax

        # The terminal's own sixteen colours: readable on light and on dark.
        text = Syntax(composed.yaml, "yaml", theme="ansi_dark", background_color="default", word_wrap=True)
        console().print(text)
    else:
        print(composed.yaml, end="")
    return 0


def _asked(words: Sequence[str], config_dirs: Sequence[Path]) -> Composed:
    """Raises ConfigError for overrides of what is shown as it is stored."""
    named = next((word for word in words if "=" not in word and not word.startswith("~")), None)
    if named is None:
        return compose(words, config_dirs)
    if len(words) > 1:
        raise ConfigError(
            f"{named} is shown as it stands; leave the other words out, or write them as key=value"
        )
    return _load(named, config_dirs)


def diff(left: str, right: str, config_dirs: Sequence[Path], json_output: bool) -> int:
    """Prints the keys in which two configs differ, both values, and the comment beside each in the YAML."""
    a, b = _load(left, config_dirs), _load(right, config_dirs)
    values_a, values_b = flat(a.config.model_dump(mode="json")), flat(b.config.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*values_a, *values_b]) if values_a.get(key) != values_b.get(key)]
    why_a, why_b = _comments(a), _comments(b)
    rows = [
        {
            "key": key,
            "a": values_a.get(key),
            "b": values_b.get(key),
            "a_comment": why_a.get(key, ""),
            "b_comment": why_b.get(key, ""),
        }
        for key in keys
    ]
    if json_output:
        print_json(rows)
    elif rows:
        table = [
            [str(row["key"]), _cell(row["key"], values_a), _cell(row["key"], values_b), _reasons(row)]
            for row in rows
        ]
        print_table(["key", left, right, "comment"], table)
    else:
        say("no difference")
    return 0


def check(overrides: Sequence[str], strict: bool, config_dirs: Sequence[Path], json_output: bool) -> int:
    """Prints what this config can never reach; 2 if it cannot train at all, under --strict if there is anything."""
    from racelab.configs.check import reachability

    findings = reachability(compose(overrides, config_dirs).config)
    if json_output:
        print_json([finding.as_dict() for finding in findings])
    for finding in [] if json_output else findings:
        print(finding.line())
    if not findings:
        say("every target and threshold can be reached")
    fatal = any(finding.severity == "error" for finding in findings)
    return 2 if fatal or (strict and findings) else 0


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a nested mapping; lists are values."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            found.update(flat(inner, f"{key}."))
        else:
            found[key] = inner
    return found


def _typed(composed: Composed) -> dict[str, str]:
    """The keys set on the command line, with their words."""
    return {word.partition("=")[0]: word for word in composed.overrides}


def _is_typed(key: str, typed: Mapping[str, str]) -> str:
    """The command-line word that set `key` (or a block that holds it), else ""."""
    parts = key.split(".")
    return next((typed[p] for n in range(len(parts), 1, -1) if (p := ".".join(parts[:n])) in typed), "")


def _place(source: Source) -> str:
    """`configs/preset/embedded.yaml:38`, or the full path of a user's file."""
    inside = source.file.is_relative_to(CONFIG_DIR)
    shown = Path("configs") / source.file.relative_to(CONFIG_DIR) if inside else source.file
    return f"{shown}:{source.line}"


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_text(item) for item in value)}]"
    return str(value) if value != "" else '""'


def _cell(key: object, values: Mapping[str, Any]) -> str:
    """The value, `-` where this config has no such key (another data source)."""
    return _text(values[str(key)]) if str(key) in values else "-"


def _reasons(row: Mapping[str, object]) -> str:
    """One comment if both sides have the same, else both."""
    both = dict.fromkeys(str(row[side]) for side in ("a_comment", "b_comment") if row[side])
    return " | ".join(both)


def _comments(composed: Composed) -> dict[str, str]:
    """Key -> comment of the YAML line in force; none for what the command line or another version set."""
    if not composed.choices:  # read from a run: its preset's comments hold where the value is the preset's
        base = compose(_base_words(composed.config))
        known, mine = flat(base.config.model_dump(mode="json")), flat(composed.config.model_dump(mode="json"))
        return {key: why for key, why in _comments(base).items() if known.get(key) == mine.get(key)}
    typed = _typed(composed)
    lines = composed.sources()
    return {key: found[-1].comment for key, found in lines.items() if not _is_typed(key, typed)}


def _base_words(config: AnyConfig) -> list[str]:
    """What a stored config was composed from, before the words of its command line."""
    if isinstance(config, EvalRunConfig):
        return [f"suite={config.eval.suite}"]
    return [f"preset={config.preset}"]


def _load(what: str, config_dirs: Sequence[Path]) -> Composed:
    """A config from a preset's name, a set of overrides in one word, or a run."""
    if "=" in what and not Path(what).exists():
        try:
            words = shlex.split(what)
        except ValueError as error:
            raise ConfigError(f"{what}: a quotation mark is not closed; close or remove it") from error
        return compose(words, config_dirs)
    presets = groups([d for d in config_dirs if d.is_dir()]).get("preset", [])
    if what in presets:
        return compose([f"preset={what}"], config_dirs)
    from racelab.cli.train import one_run, run_root
    from racelab.sweeps.manifest import resolve

    try:
        run = resolve(run_root(""), what)
    except RunFolderError as error:
        hint = did_you_mean(near(what, presets))
        raise ConfigError(f"{what}: neither a preset nor a run{hint} ({error})") from error
    return read_composed(one_run(run).path / "config" / "composed.yaml", to_look=True)


def _show_sources(composed: Composed, json_output: bool) -> None:
    values = flat(composed.config.model_dump(mode="json"))
    lines, typed = composed.sources(), _typed(composed)
    rows = []
    for key, value in values.items():
        word = _is_typed(key, typed)
        found = lines.get(key)
        place = _COMMAND_LINE if word else _place(found[-1]) if found else ""
        rows.append({"key": key, "value": value, "source": place})
    if json_output:
        print_json(rows)
    else:
        print_table(["key", "value", "set in"], [[r["key"], _text(r["value"]), r["source"]] for r in rows])


def _explain(composed: Composed, wanted: str, json_output: bool) -> None:
    values = flat(composed.config.model_dump(mode="json"))
    matches = by_tail(wanted, values)
    if len(matches) != 1:
        names = matches or near_keys(wanted, leaf_keys())
        raise ConfigError(
            f"{wanted}: {'stands for several keys' if matches else 'no such key'}{did_you_mean(names)}"
        )
    key = matches[0]
    word = _is_typed(key, _typed(composed))
    chain = [
        {"source": _place(line), "value": line.text, "comment": line.comment}
        for line in (composed.sources() if composed.choices else {}).get(key, [])
    ]
    if word:
        chain.append({"source": _COMMAND_LINE, "value": word.partition("=")[2], "comment": ""})
    about = _description(composed, key)
    if json_output:
        print_json({"key": key, "value": values[key], "about": about, "set_by": chain})
        return
    print(f"{key}: {_text(values[key])}")
    if about:
        print(f"  {about}")
    for number, step in enumerate(reversed(chain)):
        comment = f"  # {step['comment']}" if step["comment"] else ""
        print(f"  {'set in' if number == 0 else 'over  '} {step['source']}: {step['value']}{comment}")


def _description(composed: Composed, key: str) -> str:
    """The schema's own words about a key."""
    model: Any = composed.config
    *sections, last = key.split(".")
    for section in sections:
        model = getattr(model, section)
    return type(model).model_fields[last].description or ""

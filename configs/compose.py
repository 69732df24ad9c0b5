"""From overrides to a checked `Config`. The only file that knows Hydra and OmegaConf, imported lazily.

Every message is racelab's own: Hydra advises `+key` for a typo, never right against a fixed schema.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.configs.keys import (
    CONFIG_DIR,
    EVAL,
    FAMILIES,
    PRIMARY,
    RACE,
    RLDS,
    Family,
    family_of,
    groups,
    identity_keys,
    leaf_keys,
    section_keys,
    shadowed,
)
from racelab.configs.suggest import did_you_mean, near, near_keys
from racelab.configs.userfiles import check_user_files
from racelab.experiments.errors import ConfigError

if TYPE_CHECKING:
    from racelab.configs.schema import Config
    from racelab.configs.schema_rlds import AnyConfig
    from racelab.configs.sources import Source

PATH_VARIABLE = "RACELAB_CONFIG_PATH"
"""Environment variable: config folders, separated as in PATH."""

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s]+)(?P<rest>=.*)?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Composed:
    """A checked configuration.

    Attributes:
        config: the validated values.
        yaml: the same as YAML, in the order of the schema; equal configs give equal text.
        overrides: the words that led here, as given.
        sha256: of `yaml`.
        choices: group -> chosen option (e.g. `preset` -> `embedded`).
        config_dirs: the user's folders that took part.
    """

    config: AnyConfig
    yaml: str
    overrides: list[str]
    sha256: str
    choices: dict[str, str | None] = field(default_factory=dict)
    config_dirs: tuple[Path, ...] = ()

    @property
    def race(self) -> Config:
        """The config, where it is of the RACE family.

        Raises:
            ConfigError: it is not.
        """
        from racelab.configs.schema import Config

        if not isinstance(self.config, Config):
            raise ConfigError(f"an RLDS run ({' '.join(self.overrides)}); this command is for RACE runs")
        return self.config

    def sources(self) -> dict[str, list[Source]]:
        """Key -> the lines of YAML that set it, the one in force last (the command line stands above all)."""
        from racelab.configs.sources import composed_files, key_sources

        return key_sources(composed_files(self.choices, self.config_dirs))


@dataclass(frozen=True, slots=True)
class _Word:
    """One `key=value` of the command line."""

    text: str
    sign: str
    key: str
    value: str


def compose(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Composed:
    """Composes `run.yaml` with the overrides and validates the result.

    Args:
        overrides: words as `preset=paper` or `method.trqc.q_target=0.3`.
        config_dirs: extra config folders; those in $RACELAB_CONFIG_PATH follow.

    Raises:
        ConfigError: one line per problem, each with key, value, reason and the mend.
    """
    dirs = _user_dirs(config_dirs)
    words = [_parse_word(text) for text in overrides]
    family = _family(words)
    known = groups(dirs, family)
    chosen = [(w.key, w.value.strip("'\"")) for w in words if w.key in known and not w.value.startswith("{")]
    for word in words:
        _check_word(word, known, dirs, chosen, family)
    _check_place()
    check_user_files(chosen, dirs)
    if family is RACE:
        _check_variant(chosen, dirs)
    by_choice = _by_choice(chosen, dirs, family)
    raw, choices = _hydra_compose(words, known, dirs, by_choice, family)
    if by_choice != (again := _by_choice(list(choices.items()), dirs, family)):  # a preset chose the method
        raw, choices = _hydra_compose(words, known, dirs, again, family)
    config = _validate(raw, choices, words, dirs, family)
    text = to_yaml(config)
    return Composed(config, text, list(overrides), _sha256(text), choices, dirs)


def _family(words: Sequence[_Word]) -> Family:
    """RACE or RLDS, by the words; they may not choose both."""
    family = family_of((word.key, word.value.strip("'\"")) for word in words)
    method = next((word for word in words if word.key == "method"), None)
    if (
        family is RLDS
        and method is not None
        and not (RLDS.folder / "method" / f"{method.value}.yaml").is_file()
    ):
        why = next(
            word.text for word in words if word is not method and family_of([(word.key, word.value)]) is RLDS
        )
        raise ConfigError(
            f"{method.text}: a method of RACE runs, but {why} makes this an RLDS run, whose methods are conditions; "
            f"leave one of the two out"
        )
    return family


def to_yaml(config: AnyConfig) -> str:
    """The config as YAML in the order of the schema; reading it back gives an equal config."""
    import yaml

    # libyaml's emitter writes the same text in a fifth of the time; a sweep of a thousand cells notices.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(
        config.model_dump(mode="json"), Dumper=dumper, sort_keys=False, allow_unicode=True, width=110
    )


def read_composed(file: Path, *, to_look: bool = False) -> Composed:
    """Reads a `config/composed.yaml` that an earlier run left.

    Args:
        file: of the run.
        to_look: the run is only looked at: keys that the schema has gained since are taken from its preset and method
            as they are today. A run that goes on must not be given values that it did not have.

    Raises:
        ConfigError: the file is missing, no YAML, or does not fit the schema of this version.
    """
    import yaml
    from pydantic import ValidationError

    from racelab.configs.messages import Messages, dotted

    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        family = _stored_family(raw)
        config: AnyConfig = family.schema.model_validate(raw)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); is this a run folder?") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text; is this a run folder?") from error
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, file)) from error
    except ValidationError as error:
        missing = [e["loc"] for e in error.errors() if e["type"] == "missing"]
        if len(missing) != error.error_count():
            raise ConfigError("\n".join(Messages(file=file, family=family).lines(error.errors()))) from error
        if not to_look:
            lacks = ", ".join(dotted(loc, family) for loc in missing[:3])
            raise ConfigError(
                f"{file}: written by an older racelab, before there was {lacks}; go on with the version named in the "
                "run's env/environment.json, or start a new run"
            ) from error
        config = _with_new_keys(raw, missing, file, family)
    text = to_yaml(config)
    return Composed(config, text, [], _sha256(text))


def _stored_family(raw: object) -> Family:
    """By a block that only that family has."""
    if isinstance(raw, Mapping):
        return RLDS if "task" in raw else EVAL if "subject" in raw else RACE
    return RACE


def _with_new_keys(
    raw: dict[str, Any], missing: Sequence[tuple[int | str, ...]], file: Path, family: Family
) -> AnyConfig:
    """The config with the keys that it lacks, from the preset and method (task) that it names, as they are today."""
    from pydantic import ValidationError

    try:
        if family is EVAL:
            words = [f"suite={raw['eval']['suite']}"]
        else:
            words = [f"preset={raw['preset']}", f"{family.by}={raw[family.by]['name']}"]
        if family is RLDS:
            words.append(f"condition={raw['method']['condition']}")
        today = compose(words).config.model_dump()
        for loc in missing:
            there, source = raw, today
            *blocks, last = map(str, loc)
            for (
                name
            ) in blocks:  # pydantic names the chosen block of a union too: no key of that name is there
                if name in source:
                    there, source = there.setdefault(name, {}), source[name]
            there[last] = source[last]
        return family.schema.model_validate(raw)
    except (ConfigError, ValidationError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: written by another racelab, and its preset and method are not there today; read it with the "
            "version named in the run's env/environment.json"
        ) from error


def _check_place() -> None:
    """Hydra asks for the current folder; so does every relative path of a run."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder has been deleted; cd to one that exists") from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _user_dirs(config_dirs: Sequence[Path]) -> tuple[Path, ...]:
    """The user's config folders, resolved and checked (Hydra only warns about a missing one)."""
    named = [(Path(d), "--config-dir") for d in config_dirs]
    named += [(Path(d), PATH_VARIABLE) for d in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if d]
    found: dict[Path, None] = {}
    for path, origin in named:
        real = path.expanduser().resolve()
        if not real.is_dir():
            raise ConfigError(f"{origin}: {path} is not a folder; give an existing folder of YAML configs")
        found[real] = None
    for theirs, own in shadowed(found):
        raise ConfigError(
            f"{theirs}: racelab ships {own.relative_to(CONFIG_DIR)} and would take that one; rename your file"
        )
    return tuple(found)


def _parse_word(text: str) -> _Word:
    match = _OVERRIDE.fullmatch(text)
    if match is None or not _KEY.fullmatch(match["key"].replace("/", ".").replace("-", "_")):
        raise ConfigError(f"{text!r}: not an override; write key=value, e.g. run.policy_updates=12")
    sign, key, rest = match["sign"] or "", match["key"], match["rest"]
    if sign:
        _refuse_sign(text, sign, key, rest)
    if rest is None:
        raise ConfigError(f"{text}: an override needs a value; write {_example(key)}")
    if rest == "=":
        return _Word(text, sign, key, "''")
    return _Word(text, sign, key, rest[1:])


def _example(key: str) -> str:
    """How the word was probably meant: `papr` -> `preset=paper`."""
    options = {option: group for group, names in groups().items() for option in names}
    hits = near(key, options, 1)
    if hits:
        return f"key=value, e.g. {options[hits[0]]}={hits[0]}"
    keys = near_keys(key, leaf_keys(), 1)
    return f"{keys[0]}=VALUE" if keys else "key=value, e.g. run.policy_updates=12"


def _refuse_sign(text: str, sign: str, key: str, rest: str | None) -> None:
    """`+`, `++` and `~` edit the set of keys; racelab's set is fixed."""
    if sign == "~":
        mend = f"set {key}=VALUE (null where allowed)"
        if key in groups():
            mend = f"choose one of {', '.join(f'{key}={option}' for option in groups()[key])}"
        elif key in section_keys():
            first = next(name for name in leaf_keys() if name.startswith(f"{key}."))
            mend = f"set one of its keys, e.g. {first}=VALUE"
        raise ConfigError(f"{text}: keys cannot be removed, the schema is fixed; {mend}")
    plain = f"{key}{rest if rest is not None else '=VALUE'}"
    raise ConfigError(f"{text}: keys cannot be added, the schema is fixed; write {plain} without {sign!r}")


def _check_word(
    word: _Word,
    known: Mapping[str, list[str]],
    dirs: Sequence[Path],
    chosen: Sequence[tuple[str, str]],
    family: Family,
) -> None:
    """Refuses what cannot be meant, before Hydra is loaded."""
    key = word.key
    bare = word.value.strip("'\"")
    if key in known:
        if word.value.startswith("{"):
            return
        if bare not in known[key]:
            hint = did_you_mean([f"{key}={name}" for name in near(bare, known[key])])
            looked = f"; looked in racelab's own configs, {', '.join(map(str, dirs))}" if dirs else ""
            raise ConfigError(f"{word.text}: no such {key}{hint} (known: {', '.join(known[key])}{looked})")
        return
    if identity_keys().get(key) in known:
        group = identity_keys()[key]
        options = " or ".join(f"{group}={name}" for name in known[group])
        raise ConfigError(f"{word.text}: comes with the choice of {group}; write {options}")
    if key in leaf_keys(family):
        return
    if key in section_keys(family):
        if word.value.startswith("{"):
            return
        inside = [name for name in leaf_keys(family) if name.startswith(f"{key}.")]
        raise ConfigError(f"{word.text}: {key} is a block of keys; set one of them, e.g. {inside[0]}=VALUE")
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(f"{word.text}: racelab takes none of Hydra's own settings; remove the word")
    from racelab.configs.messages import keys_in_force
    from racelab.configs.sources import default_choices

    for other in FAMILIES:
        if other is not family and key in (*leaf_keys(other), *section_keys(other), *groups(dirs, other)):
            raise ConfigError(
                f"{word.text}: a key of {other.title} runs; this is one of {family.title}; "
                f"{_of_another(key, family, other)}"
            )
    in_force = keys_in_force({**default_choices(family), **dict(chosen)}, dirs)
    found = near_keys(key, [*known, *leaf_keys(family)], prefer=in_force)
    names = [f"{name}={bare}" if bare in known.get(name, []) else name for name in found]
    hint = did_you_mean(names) or "; `racelab config show` lists every key"
    raise ConfigError(f"{word.text}: no such key{hint}")


def _of_another(key: str, family: Family, other: Family) -> str:
    """The mend for a key of another family."""
    if family is RLDS:
        more = "; RLDS runs have run.updates" if key == "run.policy_updates" else ""
        return f"leave it out, or leave task= and condition= out{more}"
    if other is EVAL:
        return "leave it out; `racelab eval` takes it"
    return "leave it out" if family is EVAL else f"add {other.mark}"


def _check_variant(chosen: Sequence[tuple[str, str]], dirs: Sequence[Path]) -> None:
    """An ablation of one method says nothing about another; Hydra would complain of every key."""
    from racelab.configs.messages import misplaced_variant
    from racelab.configs.sources import default_choices

    problem = misplaced_variant({**default_choices(), **dict(chosen)}, dirs)
    if problem is not None:
        raise ConfigError(problem)


def _by_choice(chosen: Sequence[tuple[str, str | None]], dirs: Sequence[Path], family: Family) -> list[str]:
    """The choices that preset and method (or task) bring with them: `embedded=evolm` for preset=embedded method=evolm.

    Hydra cannot follow the choice of one group inside an option of another, so it is done here.
    """
    from racelab.configs.sources import default_choices, find_option, lineage

    now = {**default_choices(family), **dict(chosen)}
    choice, preset = now[family.by] or "", now.get("preset") or ""
    roots = family.roots(dirs)
    return [
        f"{p}={choice}"
        for p in lineage(preset, dirs, family)
        if p in family.by_presets and find_option(p, choice, roots)
    ]


def _hydra_compose(
    words: Sequence[_Word],
    known: Mapping[str, list[str]],
    dirs: Sequence[Path],
    first: Sequence[str],
    family: Family,
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Hydra's merge: plain values, and the chosen option of each group."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    parser = OverridesParser.create()
    lines = list(first)
    for word in words:
        # `++` sets a key even where the chosen option lacks it, so that the schema, not Hydra, explains it.
        line = f"{'' if word.key in known else '++'}{word.key}={word.value}"
        try:
            parsed = parser.parse_override(line)
        except HydraException as error:
            mend = f"quote it: {word.key}={_quoted(word)}"
            raise ConfigError(f"{word.text}: the value cannot be read; {mend}") from error
        if parsed.is_sweep_override():
            mend = (
                f"a list is written {word.key}=[{word.value}], a text with commas {word.key}={_quoted(word)}"
            )
            raise ConfigError(f"{word.text}: one run takes one value; {mend}")
        lines.append(line)
    searched = family.roots(dirs)[1:]
    if searched:
        paths = ",".join(f"'file://{str(d).replace(chr(39), chr(92) + chr(39))}'" for d in searched)
        lines.append(f"hydra.searchpath=[{paths}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(family.folder), version_base="1.3"):
            composed = hydra_compose(PRIMARY, overrides=lines, return_hydra_config=True)
        choices = {g: o for g, o in composed.hydra.runtime.choices.items() if not g.startswith("hydra/")}
        with open_dict(composed):
            del composed["hydra"]
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError("\n".join(f"{key}: has no value yet; set {key}=VALUE" for key in missing))
        raw = OmegaConf.to_container(composed, resolve=True)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, None)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_merge_message(error, dirs)) from error
    finally:
        GlobalHydra.instance().clear()
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}, choices


def _quoted(word: _Word) -> str:
    """The value in the quotes that both the shell and Hydra need; of a list each item in its own."""
    value = word.value.strip()
    if value.startswith("[") and value.endswith("]"):
        items = [item.strip().strip("'\"") for item in value[1:-1].split(",")]
        return '"[' + ",".join("'" + item.replace("'", "\\'") + "'" for item in items) + ']"'
    return "\"'" + word.value.replace("'", "\\'") + "'\""


def _yaml_message(error: Exception, file: Path | None) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = str(file) if file else getattr(mark, "name", "a YAML file")
    line = f":{mark.line + 1}" if mark is not None else ""
    return f"{where}{line}: not valid YAML ({problem}); mend that line"


def _merge_message(error: Exception, dirs: Sequence[Path]) -> str:
    """First line of an error in a user's files, without Hydra's advice."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = f" (config folders: {', '.join(map(str, dirs))})" if dirs else ""
    return f"the configuration cannot be composed: {first}{where}; mend the file or the override named here"


def _validate(
    raw: dict[str, Any],
    choices: Mapping[str, str | None],
    words: Sequence[_Word],
    dirs: tuple[Path, ...],
    family: Family,
) -> AnyConfig:
    """Schema check of the merged values; every problem becomes one line."""
    from pydantic import ValidationError

    from racelab.configs.messages import Messages

    # A chosen option is no value: what it sets stands in its file.
    typed = frozenset(w.key for w in words if w.key not in choices or w.value.startswith("{"))
    messages = Messages(choices, typed, dirs, family=family)
    raw = _nan_words(raw)
    odd = list(_odd_numbers(raw))
    try:
        config: AnyConfig = family.schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(messages.lines(error.errors(), odd))) from error
    odd += _bool_numbers(raw, config.model_dump())
    if odd:
        raise ConfigError("\n".join(messages.lines([], odd)))
    return config


def _nan_words(value: Any, key: str = "") -> Any:
    """Hydra's grammar reads the word `nan` as a number; where the schema wants the word it is put back."""
    if isinstance(value, dict):
        return {k: _nan_words(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    return "nan" if key in _NAN_WORD_KEYS and isinstance(value, float) and math.isnan(value) else value


_NAN_WORD_KEYS = frozenset({"method.rubric.on_parse_failure"})


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}")
    else:
        yield key, value


def _odd_numbers(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Infinite and not-a-number values; no key has a use for them."""
    for key, value in _leaves(raw):
        if isinstance(value, float) and not math.isfinite(value):
            yield key, value, "must be a finite number"


def _bool_numbers(raw: Mapping[str, Any], checked: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """`true` where a number is wanted: pydantic would take it for 1."""
    after = dict(_leaves(checked))
    for key, value in _leaves(raw):
        if isinstance(value, bool) and not isinstance(after.get(key), bool):
            yield key, value, "must be a number, not true or false"

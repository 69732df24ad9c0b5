"""Composing the configs of many cells: what Hydra would give for each, at a fraction of the time.

Cells of a sweep differ in a few plain `key=value` words. Hydra composes once per distinct choice of groups, and once
more to read each distinct word; the rest is putting values into a checked config and checking the result. A word is
put in by hand only where that cannot differ from composing:

- its key holds a value (no group, no block of keys), and stands in the composed config;
- its value has been read by Hydra, or is a plain number;
- no YAML file refers to the key (`${...}`), so nothing else follows it.

Any doubt, and every error, goes to `compose`, whose messages are the ones to read.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from racelab.configs.compose import PATH_VARIABLE, compose
from racelab.configs.keys import CONFIG_DIR, Family, groups, identity_keys, leaf_keys
from racelab.configs.schema_rlds import AnyConfig
from racelab.experiments.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_DOTTED = re.compile(r"\.*[A-Za-z_][\w.]*")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}(e-?[0-9]{1,2})?")
_MISSING = object()


def compose_cells(cells: Sequence[Sequence[str]], config_dirs: Sequence[Path] = ()) -> list[AnyConfig]:
    """The checked config of each cell, in order.

    Args:
        cells: the override words of each cell; of a key that stands twice the last word counts.
        config_dirs: extra config folders.

    Raises:
        ConfigError: of the first cell that does not compose; the message names its words.
    """
    wordlists = [last_words(words) for words in cells]
    common = set(wordlists[0]).intersection(*wordlists) if wordlists else set()
    composer = _Composer(tuple(config_dirs))
    split = [composer.split(words, common) for words in wordlists]
    for fixed in dict.fromkeys(fixed for fixed, _ in split):
        composer.learn(fixed, [word for other, free in split if other == fixed for word in free])
    return [
        composer.config(words, fixed, free) for words, (fixed, free) in zip(wordlists, split, strict=True)
    ]


def user_dirs(config_dirs: Sequence[Path]) -> list[Path]:
    """The user's config folders that exist: those given, and those in $RACELAB_CONFIG_PATH."""
    named = [*config_dirs, *(Path(d) for d in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if d)]
    return [path for d in named if (path := d.expanduser()).is_dir()]


def options(config_dirs: Sequence[Path], family: Family | None = None) -> dict[str, list[str]]:
    """Group -> options, racelab's own and the user's; of all families for None."""
    return groups(user_dirs(config_dirs), family)


def last_words(words: Sequence[str]) -> list[str]:
    """The words without those whose key stands again further on."""
    by_key: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0]
        by_key.pop(key, None)
        by_key[key] = word
    return list(by_key.values())


@dataclass
class _Composer:
    """What has been composed so far: whole configs by their fixed words, and the values of single words."""

    config_dirs: tuple[Path, ...]
    bases: dict[tuple[str, ...], AnyConfig | None] = field(default_factory=dict)
    values: dict[tuple[type, str], Any] = field(default_factory=dict)
    free_keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        known = options(self.config_dirs)
        referred = _referred_keys(user_dirs(self.config_dirs))
        self.free_keys = frozenset(
            key
            for key in leaf_keys()
            if key not in known and key not in identity_keys() and not _touches(key, referred)
        )

    def split(self, words: Sequence[str], common: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(words that Hydra must see, words that can be put in by hand), each in order."""
        free = tuple(w for w in words if w not in common and self._is_free(w))
        return tuple(w for w in words if w not in free), free

    def _is_free(self, word: str) -> bool:
        key, equals, value = word.partition("=")
        return bool(equals) and key in self.free_keys and "${" not in value

    def learn(self, fixed: tuple[str, ...], words: Sequence[str]) -> None:
        """Composes `fixed`, and reads the new ones of `words` with one word per key at a time."""
        base = self._base(fixed)
        if base is None:
            return
        waiting: dict[str, dict[str, None]] = {}
        for word in words:
            key, _, value = word.partition("=")
            block = _block(base, key)
            if block is None or (block, word) in self.values:
                continue
            if (number := _number(value)) is not None:
                self.values[block, word] = number
            else:
                waiting.setdefault(key, {})[word] = None
        while waiting:
            batch = [next(iter(found)) for found in waiting.values()]
            self._read(fixed, batch)
            for word in batch:
                self.values.setdefault((_block(base, word.partition("=")[0]) or object, word), _MISSING)
            waiting = {key: rest for key, found in waiting.items() if (rest := dict(list(found.items())[1:]))}

    def _base(self, fixed: tuple[str, ...]) -> AnyConfig | None:
        if fixed not in self.bases:
            try:
                self.bases[fixed] = compose(fixed, self.config_dirs).config
            except ConfigError:  # perhaps whole only with the cell's own words
                self.bases[fixed] = None
        return self.bases[fixed]

    def _read(self, fixed: tuple[str, ...], batch: Sequence[str]) -> None:
        """Remembers the values of words, as the schema understands them; of none that only fits with others."""
        try:
            config = compose([*fixed, *batch], self.config_dirs).config
        except ConfigError:
            if len(batch) > 1:
                for word in batch:
                    self._read(fixed, [word])
            return
        for word in batch:
            key = word.partition("=")[0]
            block = _block(config, key)
            if block is not None:
                self.values[block, word] = _at(config.model_dump(), key)

    def config(self, words: Sequence[str], fixed: tuple[str, ...], free: Sequence[str]) -> AnyConfig:
        """The config of one cell."""
        base = self.bases.get(fixed)
        made = self._put(base, free) if base is not None else None
        if made is not None:
            return made
        return compose(words, self.config_dirs).config

    def _put(self, base: AnyConfig, free: Sequence[str]) -> AnyConfig | None:
        """The base with the values of `free`; None where that needs Hydra or is an error."""
        from pydantic import ValidationError

        raw = copy.deepcopy(base.model_dump())
        for word in free:
            key = word.partition("=")[0]
            value = self.values.get((_block(base, key) or object, word), _MISSING)
            if value is _MISSING:
                return None
            *sections, last = key.split(".")
            inner = raw
            for section in sections:
                inner = inner[section]
            inner[last] = value
        try:
            return type(base).model_validate(raw)
        except ValidationError:
            return None


def _number(value: str) -> int | float | None:
    """A number that Hydra's grammar, too, cannot read but as this one; None for every other text."""
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else None


def _block(config: AnyConfig, key: str) -> type | None:
    """The class of the block that holds `key` in this config, None if it has no such key."""
    model: Any = config
    *sections, last = key.split(".")
    for section in sections:
        model = getattr(model, section, None)
    return type(model) if last in getattr(type(model), "model_fields", {}) else None


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def _referred_keys(config_dirs: Sequence[Path]) -> frozenset[str]:
    """Every dotted name inside a `${...}` of a YAML file; relative ones keep their leading dots."""
    found: set[str] = set()
    for root in (CONFIG_DIR, *config_dirs):
        for path in root.rglob("*.yaml"):
            for inside in _REFERENCE.findall(path.read_text(encoding="utf-8", errors="replace")):
                found.update(_DOTTED.findall(inside))
    return frozenset(found)


def _touches(key: str, referred: frozenset[str]) -> bool:
    """Whether some reference may read `key`: it is named, or a block above it is, or its last part relatively."""
    return any(
        name == key
        or key.startswith(f"{name}.")
        or (name.startswith(".") and key.rpartition(".")[2] in name.split("."))
        for name in referred
    )

"""A grid file: which cells a sweep has.

    name: learning-rates
    base: [preset=embedded, run.policy_updates=8]   # words of every cell
    axes:
      learner.lr: [1.0e-4, 3.0e-4]                  # a key and its values
      routing:                                      # or labels and their words
        full: []
        plain: [method.routing.mode=off, method.pool.fill=uniform]
    seeds: [0, 1]
    exclude:
      - {learner.lr: 3.0e-4, routing: plain}        # a cell that matches every pair of one rule is left out
    include:
      - {label: slow, overrides: [learner.lr=1.0e-6]}

`name` and one of `axes`, `seeds`, `include` must be there. Every mistake is an error with the file's line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from racelab.configs.keys import leaf_keys, section_keys
from racelab.configs.suggest import did_you_mean, near_keys
from racelab.sweeps.cells import Spec, slug
from racelab.sweeps.composing import options
from racelab.sweeps.keyfile import KeyFile
from racelab.sweeps.literals import as_word, literal

_KEYS: Final = ("name", "base", "axes", "seeds", "exclude", "include")
_INCLUDE_KEYS: Final = ("label", "overrides")
Value = str | int | float | bool | None
Level = tuple[str, tuple[str, ...], Any]
"""One value of an axis: its part of the label, its words, and what an exclude rule may call it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid file that has been read and checked.

    Attributes:
        name: of the sweep.
        specs: the cells, labels in the order of the file, seeds innermost.
    """

    name: str
    specs: tuple[Spec, ...]


def read_grid(
    file: Path, more: Sequence[str] = (), seeds: Sequence[int] | None = None, config_dirs: Sequence[Path] = ()
) -> Grid:
    """Reads a grid file.

    Args:
        file: YAML.
        more: words for every cell, above those of `base`.
        seeds: in the place of the file's.
        config_dirs: the user's config folders, whose groups may be axes.

    Raises:
        ConfigError: the file cannot be read, or one line per mistake.
    """
    reader = _Reader(file, "grid", _KEYS, config_dirs)
    content = reader.content()
    axes = reader.axes(content)
    reader.refuse_axis_words(axes, more)
    chosen = list(seeds) if seeds is not None else reader.seeds(content, "run.seed" in axes)
    taken: list[int | None] = [*chosen] or [None]
    base = (*reader.words(content.get("base"), "base"), *more)
    product = [tuple(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]
    rules = reader.rules(content, axes, product, chosen)
    specs = [
        Spec(",".join(part for _, (part, _, _) in cell) or reader.name(content), seed, (*base, *_words(cell)))
        for cell in (product if axes or (chosen and not content.get("include")) else [])
        for seed in taken
        if not any(_matches(rule, cell, seed) for rule in rules)
    ]
    for label, words in reader.included(content):
        specs += [Spec(label, seed, (*base, *words)) for seed in taken]
    reader.refuse_two_seeds(specs)
    if not specs:
        reader.fail("the grid has no cells: there are no axes, or the exclude rules leave none", "axes")
    return Grid(reader.name(content), tuple(specs))


def _words(cell: Sequence[tuple[str, Level]]) -> tuple[str, ...]:
    return tuple(word for _, (_, words, _) in cell for word in words)


def _matches(rule: Mapping[str, Any], cell: Sequence[tuple[str, Level]], seed: int | None) -> bool:
    called = {axis: level[2] for axis, level in cell} | {"seed": seed}
    return all(_same(called[key], value) for key, value in rule.items())


def _same(a: Any, b: Any) -> bool:
    """Equal, and `true` is not 1."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


@dataclass
class _Reader(KeyFile):
    """Reads the parts of a grid file."""

    config_dirs: Sequence[Path]

    def axes(self, content: Mapping[str, Any]) -> dict[str, list[Level]]:
        """Axis -> its levels."""
        self.name(content)
        axes = content.get("axes") or {}
        if not isinstance(axes, dict):
            self.fail("must be keys with their values, as learner.lr: [1.0e-4, 3.0e-4]", "axes")
        return {str(key): self._levels(str(key), values) for key, values in axes.items()}

    def _levels(self, key: str, values: Any) -> list[Level]:
        path = f"axes/{key}"
        if isinstance(values, dict) and values:
            if key == "seed":
                self.fail("seeds have a key of their own, seeds: [0, 1]", path)
            for label in values:
                if isinstance(label, bool) or not isinstance(label, str | int | float):
                    self.fail("a label is a text; put quotes around on, off, yes, no and null", path)
            return [
                (slug(str(label)), self.words(words, f"{path}/{label}"), str(label))
                for label, words in values.items()
            ]
        if not isinstance(values, list) or not values:
            self.fail("must be a list of values, or labels with their overrides", path)
        self._check_key(key, path)
        levels: list[Level] = []
        for index, value in enumerate(values):
            scalars = value if isinstance(value, list) else [value]
            if not all(isinstance(item, Value) for item in scalars):
                self.fail(
                    "a value is a number, a text, true, false, null or a list of them", f"{path}/{index}"
                )
            text = literal(value).strip("'")
            part = f"{key}={text}" if key in ("method", "variant") else f"{key.rpartition('.')[2]}={text}"
            levels.append((slug(part), (as_word(key, value),), value))
        return levels

    def _check_key(self, key: str, path: str) -> None:
        known = [*options(self.config_dirs), *leaf_keys(), *section_keys()]
        if key not in known:
            hint = did_you_mean(near_keys(key, known)) or "; `racelab config show` lists every key"
            self.fail(f"no such key{hint}", path)

    def refuse_axis_words(self, axes: Mapping[str, Any], more: Sequence[str]) -> None:
        """A word of the command line that sets an axis would make all its cells equal."""
        for word in more:
            key = word.partition("=")[0]
            if key in axes:
                self.fail(f"{word} sets an axis of the grid; leave the word out, or the axis", f"axes/{key}")

    def refuse_two_seeds(self, specs: Sequence[Spec]) -> None:
        """A word that sets the seed of a cell that gets one from the list of seeds would count for nothing."""
        for spec in specs:
            word = next((word for word in spec.overrides if word.partition("=")[0] == "run.seed"), None)
            if word is not None and spec.seed is not None:
                self.fail(f"{word} and the list of seeds both say the seed; leave one of them out", "seeds")

    def seeds(self, content: Mapping[str, Any], taken: bool) -> list[int]:
        """The seeds, [] if the file names none."""
        seeds = content.get("seeds")
        if seeds is None:
            return []
        whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
        if not whole or not seeds or len(set(seeds)) != len(seeds):
            self.fail("must be a list of whole numbers, none twice, as [0, 1, 2]", "seeds")
        if taken:
            self.fail("run.seed is an axis too; keep one of them", "seeds")
        return list(seeds)

    def rules(
        self,
        content: Mapping[str, Any],
        axes: Mapping[str, list[Level]],
        product: Sequence[Sequence[tuple[str, Level]]],
        seeds: Sequence[int],
    ) -> list[dict[str, Any]]:
        """The exclude rules; each must leave something out."""
        rules = content.get("exclude") or []
        if not isinstance(rules, list):
            self.fail("must be a list of rules, as - {learner.lr: 3.0e-4, seed: 1}", "exclude")
        known = [*axes, *(["seed"] if seeds else [])]
        for index, rule in enumerate(rules):
            path = f"exclude/{index}"
            if not isinstance(rule, dict) or not rule:
                self.fail("a rule is pairs of an axis and one of its values", path)
            for key in rule:
                if key not in known:
                    hint = did_you_mean(near_keys(str(key), known)) or f" (axes: {', '.join(known)})"
                    self.fail(f"no such axis{hint}", f"{path}/{key}")
            if not any(_matches(rule, cell, seed) for cell in product for seed in (*seeds, None)):
                self.fail(f"the rule {rule} matches no cell; compare its values with those of the axes", path)
        return rules

    def included(self, content: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(label, words) of the cells beside the product."""
        entries = content.get("include") or []
        if not isinstance(entries, list):
            self.fail("must be a list, as - {label: slow, overrides: [learner.lr=1.0e-6]}", "include")
        for index, entry in enumerate(entries):
            path = f"include/{index}"
            if not isinstance(entry, dict) or not isinstance(entry.get("label"), str):
                self.fail("needs a label and overrides", path)
            self.refuse_unknown(entry, _INCLUDE_KEYS, path)
            yield slug(entry["label"]), self.words(entry.get("overrides"), f"{path}/overrides")

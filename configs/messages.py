"""One line per problem of a configuration: key, value, file and line, reason, mend."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.configs.keys import RACE, Family, family_of, groups, leaf_keys, union_sections
from racelab.configs.sources import Source, composed_files, find_option, key_sources, read_sources
from racelab.configs.suggest import did_you_mean, near, near_keys

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


@dataclass(frozen=True)
class Messages:
    """Turns pydantic's findings about one composition into lines for people.

    Attributes:
        choices: group -> chosen option.
        typed: the keys set on the command line; for them no file is named, the reader has just typed them.
        dirs: the user's config folders.
        file: the one file that was read, where nothing was composed.
        family: of the schema that found the problems; None: the one that `choices` choose.
    """

    choices: Mapping[str, str | None] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    dirs: tuple[Path, ...] = ()
    file: Path | None = None
    family: Family | None = None

    @property
    def _family(self) -> Family:
        return self.family or family_of(self.choices.items())

    @cached_property
    def _sources(self) -> dict[str, list[Source]]:
        return key_sources(composed_files(self.choices, self.dirs))

    def lines(
        self, details: Iterable[ErrorDetails], odd: Sequence[tuple[str, object, str]] = ()
    ) -> list[str]:
        """All problems, one line each; `odd` are (key, value, reason) found outside the schema."""
        said = [key for key, _, _ in odd]
        found = [f"{key}={shown(value)}{self._where(key)}: {why}" for key, value, why in odd]
        for detail in details:
            key = dotted(detail["loc"], self._family)
            # A rule that ties keys together says nothing new about a value already refused.
            if not any(other == key or other.startswith(f"{key}.") for other in said):
                found.append(self._line(key, detail))
        return found

    def _where(self, key: str) -> str:
        """` (FILE:LINE)` of the YAML line that set the key; empty if the command line set it."""
        if self.file is not None:
            return f" ({self.file})"
        parts = key.split(".")
        prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        if any(prefix in self.typed for prefix in prefixes):
            return ""
        if any(word.startswith(f"{key}.") for word in self.typed):
            return ""
        for prefix in prefixes:
            if prefix in self._sources:
                last = self._sources[prefix][-1]
                return f" ({last.file}:{last.line})"
        return ""

    def _line(self, key: str, detail: ErrorDetails) -> str:
        kind, value = detail["type"], detail["input"]
        where = self._where(key) if key else ""
        if kind == "missing":
            return f"{key}{where}: has no value; set {key}=VALUE"
        if kind == "value_error":
            reason = detail["msg"].removeprefix("Value error, ")
            return f"{key}{where}: {reason}" if key else reason
        label = key if isinstance(value, dict) else f"{key}={shown(value)}"
        if kind == "extra_forbidden":
            return f"{label}{where}: {self._unknown(key)}"
        if kind == "literal_error":
            return f"{label}{where}: {_literal_reason(detail)}"
        reason = detail["msg"].replace("Input should be", "must be").partition(", unable to parse")[0]
        if kind == "string_type" and isinstance(value, int | float):
            reason += f"; quote it: {key}=\"'{value}'\""
        return f"{label}{where}: {reason[:1].lower()}{reason[1:]}"

    def _unknown(self, key: str) -> str:
        """Why a key is refused that the merged values hold: it belongs to another option, or to nothing."""
        family = self._family
        if key not in leaf_keys(family):
            return f"no such key{did_you_mean(near_keys(key, leaf_keys(family), prefer=self._sources))}"
        group = key.partition(".")[0]
        holders = [f"{group}={option}" for option in _holders(key, self.dirs, family)]
        mend = f"choose {' or '.join(holders)}" if holders else "leave it out"
        return f"not a key of {group}={self.choices.get(group)}; {mend}"


def keys_in_force(choices: Mapping[str, str | None], dirs: Sequence[Path] = ()) -> frozenset[str]:
    """All keys but those of the options not chosen: of the nine methods, only the keys of one.

    Empty where a file cannot be read; that is said elsewhere.
    """
    import yaml

    family = family_of(choices.items())
    several = union_sections(family)
    try:
        held = key_sources(composed_files({group: choices.get(group) for group in several}, dirs))
    except (OSError, ValueError, yaml.YAMLError):
        return frozenset()
    return frozenset(key for key in leaf_keys(family) if key in held or key.partition(".")[0] not in several)


def misplaced_variant(choices: Mapping[str, str | None], dirs: Sequence[Path] = ()) -> str | None:
    """What to say of a variant that the chosen method does not have; None if there is nothing to say."""
    variant, method = choices.get("variant"), choices.get("method")
    holders = _holders("method.variant", dirs, RACE) if variant else []
    if not variant or method in holders:
        return None
    home = " or ".join(f"method={option}" for option in holders)
    return f"variant={variant}: an ablation of {home}, not of method={method}; choose {home} or leave the variant out"


def _holders(key: str, dirs: Sequence[Path], family: Family) -> list[str]:
    """The options of the key's group whose YAML has the key."""
    group = key.partition(".")[0]
    found = []
    for option in groups(dirs, family).get(group, []):
        file = find_option(group, option, family.roots(dirs))
        if file is not None and any(source.key == key for source in read_sources(file, group)):
            found.append(option)
    return found


def shown(value: object) -> str:
    """A value as YAML would write it, cut to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dotted(loc: Sequence[int | str], family: Family) -> str:
    """The key of a pydantic error's place, without the tag that a union of this family's schema adds."""
    parts = [str(part) for part in loc]
    if len(parts) > 1 and parts[0] in union_sections(family):
        del parts[1]
    return ".".join(parts)


def _literal_reason(detail: ErrorDetails) -> str:
    expected = str(detail.get("ctx", {}).get("expected", ""))
    allowed = re.findall(r"'([^']*)'", expected)
    value = detail["input"]
    if isinstance(value, bool) and {"on", "off"} & set(allowed):
        return f'YAML reads on and off as true and false; write "{"on" if value else "off"}" in quotes'
    return f"must be one of {', '.join(allowed)}{did_you_mean(near(str(value), allowed))}"

"""Where a composed value came from: file, line and the comment beside it. Reads YAML; knows no Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.configs.keys import PRIMARY, RACE, Family, family_of

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True, slots=True)
class Source:
    """One line of YAML that sets a key.

    Attributes:
        key: dotted.
        text: the value as written there ("" for a block of keys).
        file: the YAML file.
        line: starting at 1.
        comment: the comment beside it, else the comment lines right above it; "" if there is none.
    """

    key: str
    text: str
    file: Path
    line: int
    comment: str


def _package(lines: Sequence[str], group: str) -> str:
    """The dotted prefix of a file's keys: its group, unless its head says `# @package NAME` (_global_: none)."""
    head = re.fullmatch(r"#\s*@package\s+(\S+)\s*", lines[0]) if lines else None
    return group if head is None else head[1].replace("_global_", "")


def _comment(lines: Sequence[str], line: int, column_end: int) -> str:
    beside = lines[line][column_end:]
    if "#" in beside:
        return beside.partition("#")[2].strip()
    above: list[str] = []
    for index in range(line - 1, -1, -1):
        text = lines[index].strip()
        if not text.startswith("#"):
            return " ".join(above)
        above.insert(0, text.lstrip("# ").rstrip())
    return ""  # a comment that reaches the head of the file speaks of the whole file, not of its first key


def _walk(node: yaml.Node, prefix: str, file: Path, lines: Sequence[str]) -> Iterator[Source]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        name = str(key_node.value)
        key = f"{prefix}.{name}" if prefix else name
        line = key_node.start_mark.line
        block = isinstance(value_node, yaml.MappingNode)
        end = value_node.end_mark
        column = end.column if not block and end.line == line else key_node.end_mark.column + 1
        text = "" if block else lines[line][value_node.start_mark.column : column].strip()
        yield Source(key, text, file, line + 1, _comment(lines, line, column))
        if block:
            yield from _walk(value_node, key, file, lines)


def read_sources(file: Path, group: str = "") -> list[Source]:
    """All keys that a YAML file sets, with line and comment; `defaults` is not a key.

    Raises:
        yaml.YAMLError: the file is not YAML.
    """
    import yaml

    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    # The pure loader: the C one does not keep columns in characters.
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return []
    found = _walk(node, _package(lines, group), file, lines)
    return [s for s in found if s.key.rpartition(".")[2] != "defaults" and ".defaults." not in f".{s.key}."]


def find_option(group: str, option: str, roots: Sequence[Path]) -> Path | None:
    """The YAML file of an option; the first root that has it wins, as in Hydra."""
    for root in roots:
        file = root / group / f"{option}.yaml"
        if file.is_file():
            return file
    return None


def _with_parents(file: Path, group: str, roots: Sequence[Path], seen: set[Path]) -> list[tuple[Path, str]]:
    """A file after the files that its own defaults list builds on (same group), as Hydra merges them."""
    import yaml

    if file in seen:
        return []
    seen.add(file)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        content = None  # the merge will name the line
    entries = content.get("defaults", []) if isinstance(content, dict) else []
    ordered: list[tuple[Path, str]] = []
    after_self: list[tuple[Path, str]] = []
    passed_self = False
    for entry in entries if isinstance(entries, list) else []:
        if entry == "_self_":
            passed_self = True
        elif isinstance(entry, str):
            parent = find_option(group, entry.rpartition("/")[2], roots)
            if parent is not None:
                (after_self if passed_self else ordered).extend(_with_parents(parent, group, roots, seen))
    return [*ordered, (file, group), *after_self]


@cache
def _default_choices(folder: Path) -> dict[str, str | None]:
    import yaml

    entries = yaml.safe_load((folder / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def default_choices(family: Family = RACE) -> dict[str, str | None]:
    """Group -> option of the family's `run.yaml`'s own defaults list, in its order."""
    return _default_choices(family.folder)


def lineage(preset: str, config_dirs: Sequence[Path] = (), family: Family = RACE) -> list[str]:
    """The presets that a preset builds on, the first one first, itself last."""
    roots = family.roots(config_dirs)
    file = find_option("preset", preset, roots)
    return [] if file is None else [f.stem for f, _ in _with_parents(file, "preset", roots, set())]


def composed_files(
    choices: Mapping[str, str | None], config_dirs: Sequence[Path] = ()
) -> list[tuple[Path, str]]:
    """(file, group) of every YAML file in a composition, lowest priority first: in the order of `run.yaml`."""
    family = family_of(choices.items())
    roots = family.roots(config_dirs)
    files = [(family.folder / f"{PRIMARY}.yaml", "")]
    for group in default_choices(family):
        option = choices.get(group)
        file = find_option(group, option, roots) if option else None
        if file is not None:
            files.extend(_with_parents(file, group, roots, set()))
    return files


def key_sources(files: Sequence[tuple[Path, str]]) -> dict[str, list[Source]]:
    """Key -> every line that sets it, the one in force last."""
    found: dict[str, list[Source]] = {}
    for file, group in files:
        for source in read_sources(file, group):
            found.setdefault(source.key, []).append(source)
    return found

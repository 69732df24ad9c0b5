"""What can be wrong with a user's YAML file before its keys are looked at. Hydra would not name the file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from racelab.configs.sources import find_option
from racelab.experiments.errors import ConfigError

_HEADER = "# @package _global_"


def check_user_files(chosen: Iterable[tuple[str, str]], dirs: Sequence[Path]) -> None:
    """Reads the user's files behind these choices, and those that their defaults lists build on.

    Args:
        chosen: (group, option).
        dirs: the user's config folders.

    Raises:
        ConfigError: a file that is unreadable, not UTF-8, empty, no mapping, a preset without its header, or that
            builds on itself. What is not YAML is left to the merge, which names the line.
    """
    for group, option in chosen:
        _follow(group, option, dirs, ())


def _follow(group: str, option: str, dirs: Sequence[Path], above: tuple[Path, ...]) -> None:
    file = find_option(group, option, dirs)
    if file is None:
        return
    if file in above:
        chain = " -> ".join(path.stem for path in (*above[above.index(file) :], file))
        raise ConfigError(f"{file}: its defaults lead back to itself ({chain}); take one of them out")
    for inner_group, inner in _parents(_content(file, group), group):
        _follow(inner_group, inner, dirs, (*above, file))


def _content(file: Path, group: str) -> Mapping[str, Any]:
    """The keys of a file; empty where it is not YAML."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text; save it as UTF-8 YAML") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{file}: holds characters that are not text; save it as UTF-8 YAML") from error
    except yaml.YAMLError:
        return {}
    example = f"write `{_HEADER}`, then keys" if group == "preset" else "write keys, one `key: value` a line"
    if content is None:
        raise ConfigError(f"{file}: empty; {example}")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: holds a {type(content).__name__}, not keys; {example}")
    if group == "preset" and not _is_global(text):
        raise ConfigError(f"{file}: a preset sets keys of every group; make `{_HEADER}` its first line")
    return content


def _is_global(text: str) -> bool:
    """True if the header says so: the lines that start with `# @`, before any other line."""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if not re.match(r"#\s*@", line):
            return False
        if re.fullmatch(r"#+\s*@package\s+_global_", line):
            return True
    return False


def _parents(content: Mapping[str, Any], group: str) -> Iterator[tuple[str, str]]:
    """(group, option) of the entries of a defaults list."""
    entries = content.get("defaults")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str) and entry != "_self_":
            yield group, entry.rpartition("/")[2]
        elif isinstance(entry, Mapping):
            for key, option in entry.items():
                if isinstance(option, str):
                    yield str(key).removeprefix("override ").strip().rpartition("/")[2], option

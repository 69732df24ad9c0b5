"""A YAML file of a fixed set of keys (a grid, a graph), in which every mistake has a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError
from racelab.experiments.fsio import explain
from racelab.sweeps.cells import slug
from racelab.sweeps.literals import loader

if TYPE_CHECKING:
    import yaml


@dataclass
class KeyFile:
    """Reads one file; knows the line of each key for the messages.

    Attributes:
        file: YAML.
        what: it describes, for the messages: `grid`.
        known: its top keys.
    """

    file: Path
    what: str
    known: Sequence[str]
    _lines: dict[str, int] = field(default_factory=dict, init=False)

    def content(self) -> dict[str, Any]:
        """The file's top mapping, with known keys only, none twice.

        Raises:
            ConfigError: the file cannot be read, is no YAML, or holds a key that is unknown or stands twice.
        """
        import yaml

        try:
            text = self.file.read_text(encoding="utf-8")
            root = yaml.compose(text, Loader=loader())
            content = yaml.load(text, Loader=loader())
        except OSError as error:
            raise ConfigError(f"{self.file}: cannot be read ({explain(error)})") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.file}: not UTF-8 text; save it as UTF-8 YAML") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"{self.file}{line}: not valid YAML ({problem}); mend that line") from error
        except ValueError as error:  # 2026-13-01 looks like a date
            raise ConfigError(
                f"{self.file}: holds a value that is none ({error}); put quotes around it"
            ) from error
        if not isinstance(content, dict):
            raise ConfigError(f"{self.file}: holds no keys; a {self.what} has {', '.join(self.known)}")
        self._lines = {}
        self._note_lines(root, "")
        self.refuse_unknown(content, self.known)
        return {str(key): value for key, value in content.items()}

    def _note_lines(self, node: yaml.Node | None, prefix: str) -> None:
        """The line of every key of nested mappings, by its path; a key that stands twice is an error."""
        import yaml

        if isinstance(node, yaml.SequenceNode):
            pairs = [(str(index), item, item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            pairs = [(str(key.value), key, value) for key, value in node.value]
        else:
            return
        for name, at, value in pairs:
            path = f"{prefix}/{name}" if prefix else name
            if path in self._lines:
                first, self._lines[path] = self._lines[path], at.start_mark.line + 1
                self.fail(f"stands twice, first in line {first}; remove one", path)
            self._lines[path] = at.start_mark.line + 1
            self._note_lines(value, path)

    def place(self, path: str) -> str:
        """File, line and key, as messages name them: `grid.yaml:3: axes: learner.lr`."""
        line = self._lines.get(path)
        return f"{self.file}{f':{line}' if line else ''}: {path.replace('/', ': ')}"

    def fail(self, message: str, path: str) -> NoReturn:
        """Raises ConfigError with file, line and key."""
        raise ConfigError(f"{self.place(path)}: {message}")

    def refuse_unknown(self, mapping: Mapping[Any, Any], known: Sequence[str], prefix: str = "") -> None:
        """Raises ConfigError for a key that is not known; `prefix` is the path of the mapping."""
        for key in mapping:
            if key not in known:
                hint = did_you_mean(near(str(key), known))
                path = f"{prefix}/{key}" if prefix else str(key)
                self.fail(f"no such key{hint} (known: {', '.join(known)})", path)

    def name(self, content: Mapping[str, Any]) -> str:
        """What the file calls itself."""
        name = content.get("name")
        if name is None:
            self.fail(f"is missing; a {self.what} needs a name", "name")
        if not isinstance(name, str) or slug(name) != name:
            self.fail(f"{name!r} is no name; take letters, digits and . _ = + @ , -", "name")
        return name

    def words(self, value: Any, path: str) -> tuple[str, ...]:
        """A list of `key=value` words."""
        found = [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(word, str) and "=" in word for word in found):
            self.fail("must be a list of overrides, as [preset=paper, learner.lr=1.0e-6]", path)
        return tuple(found)

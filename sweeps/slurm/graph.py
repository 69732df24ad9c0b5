"""A graph file: command lines of racelab as stages, and which of them waits for which.

    name: nightly
    base: [preset=embedded, launcher=slurm]       # words of every stage that makes runs; launcher words count for all
    stages:
      train:
        command: train run.seed=0                 # a command line of racelab
      replay:
        command: replay {train}                   # {train}: the id of that stage's run, or of its sweep
        after: [train]                            # only if train ended well, else never
        launcher: [launcher.time_min=30]
      report:
        command: show {train}
        after_any: [train, replay]                # whatever became of them

`name` and `stages` must be there, `command` in every stage. Every mistake is an error with the file's line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError, RacelabError
from racelab.sweeps.keyfile import KeyFile
from racelab.sweeps.slurm.model import After, Condition

_KEYS: Final = ("name", "base", "stages")
_STAGE_KEYS: Final = ("command", "after", "after_any", "launcher", "every_node")
_WAITS: Final[Mapping[str, Condition]] = {"after": "ok", "after_any": "any"}
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_REFERENCE: Final = re.compile(r"(?<!\$)\{([A-Za-z][A-Za-z0-9_-]*)\}")
"""`{train}`; neither `${a.key}` nor `{a: 1}`, which are values of overrides."""

MakesRuns = Callable[[Sequence[str]], bool]
"""Whether the words of a command line make runs; raises ConfigError for words that cannot be a stage's."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One command line of a graph.

    Attributes:
        name: unique in the graph.
        words: of the command line, `{train}` where the id of a run stands.
        waits: for which stages, and how they must have ended.
        launcher: further words of the launcher, of this stage only.
        every_node: a command that every node of its job executes.
        makes_runs: train, ablate, baseline, task and sweep do; any other command is one job.
        place: of its command in the file, for messages.
    """

    name: str
    words: tuple[str, ...]
    waits: tuple[After, ...]
    launcher: tuple[str, ...]
    every_node: bool
    makes_runs: bool
    place: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph file that has been read and checked.

    Attributes:
        name: of the graph.
        base: words of every stage that makes runs.
        stages: every one behind those it waits for, else as in the file.
        file: where it was read.
    """

    name: str
    base: tuple[str, ...]
    stages: tuple[Stage, ...]
    file: Path


def is_launcher_word(word: str) -> bool:
    """Whether an override is one of the launcher: `launcher=slurm`, `launcher.partition=gpu`."""
    return word.partition("=")[0].partition(".")[0] == "launcher"


def read_graph(file: Path, makes_runs: MakesRuns) -> Graph:
    """Reads a graph file.

    Args:
        file: YAML.
        makes_runs: knows the command line.

    Raises:
        ConfigError: the file cannot be read, or what is wrong in it, and where.
    """
    reader = _Reader(file, "graph", _KEYS, makes_runs)
    content = reader.content()
    name = reader.name(content)
    base = reader.words(content.get("base"), "base")
    stages = reader.stages(content)
    return Graph(name, base, tuple(reader.in_order(stages)), file)


def fill(words: Sequence[str], ids: Mapping[str, str]) -> tuple[str, ...]:
    """The words with the ids of runs in the place of `{stage}`."""
    return tuple(_REFERENCE.sub(lambda match: ids[match[1]], word) for word in words)


@dataclass
class _Reader(KeyFile):
    """Reads the parts of a graph file."""

    makes_runs: MakesRuns

    def stages(self, content: Mapping[str, Any]) -> dict[str, Stage]:
        """Name -> stage, in the order of the file."""
        stages = content.get("stages")
        if not isinstance(stages, dict) or not stages:
            self.fail(
                "the graph has no stages; write a name and a command, as train: {command: train}", "stages"
            )
        for name in stages:
            self._check_name(name, stages)
        found = {name: self._stage(name, block, stages) for name, block in stages.items()}
        for stage in found.values():
            self._check_references(stage, found)
        return found

    def _check_name(self, name: object, stages: Mapping[Any, Any]) -> None:
        path = f"stages/{name}"
        if not isinstance(name, str):
            self.fail("the name of a stage is a text; put quotes around on, off, yes, no and numbers", path)
        if not _NAME.fullmatch(name):
            self.fail("no name for a stage; take letters, digits, _ and -, a letter first, at most 40", path)
        whole, dash, number = name.rpartition("-")
        if dash and number.isdecimal() and whole in stages:
            self.fail(
                f"the parts of a large stage {whole} have such names; take another, as {whole}{number}", path
            )

    def _stage(self, name: str, block: Any, stages: Mapping[str, Any]) -> Stage:
        path = f"stages/{name}"
        if not isinstance(block, dict):
            self.fail("a stage is keys, as {command: train run.seed=0}", path)
        self.refuse_unknown(block, _STAGE_KEYS, path)
        words = self._command(block.get("command"), f"{path}/command")
        makes_runs = self._makes_runs(words, f"{path}/command")
        every_node = block.get("every_node", False)
        if not isinstance(every_node, bool):
            self.fail("must be true or false", f"{path}/every_node")
        if every_node and makes_runs:
            self.fail(
                f"is for commands that make no runs, not for {words[0]}; leave it out", f"{path}/every_node"
            )
        waits = tuple(self._waits(name, block, stages))
        launcher = self._launcher(block.get("launcher"), f"{path}/launcher")
        return Stage(name, words, waits, launcher, every_node, makes_runs, self.place(f"{path}/command"))

    def _command(self, text: object, path: str) -> tuple[str, ...]:
        if text is None:
            self.fail("is missing; write a command line of racelab, as train run.seed=0", path)
        if not isinstance(text, str) or not text.strip():
            self.fail("must be a command line of racelab, as train run.seed=0", path)
        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            self.fail(f"cannot be split into words ({str(error).lower()}); close the quotes", path)

    def _makes_runs(self, words: Sequence[str], path: str) -> bool:
        try:
            return self.makes_runs(words)
        except ConfigError as error:
            fail_at(self.place(path), error)

    def _launcher(self, value: Any, path: str) -> tuple[str, ...]:
        words = self.words(value, path)
        for word in words:
            if not is_launcher_word(word):
                self.fail(f"{word} is no key of the launcher; it belongs into the stage's command", path)
        return words

    def _waits(self, name: str, block: Mapping[str, Any], stages: Mapping[str, Any]) -> Iterator[After]:
        seen: dict[str, str] = {}
        for key, condition in _WAITS.items():
            path = f"stages/{name}/{key}"
            others = block.get(key, [])
            if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
                self.fail("must be a list of stages, as [train]", path)
            for other in others:
                if other not in stages:
                    names = [one for one in stages if one != name]
                    hint = did_you_mean(near(other, names)) or f" (stages: {', '.join(names)})" * bool(names)
                    self.fail(f"no stage {other}{hint}", path)
                if other == name:
                    self.fail("a stage cannot wait for itself; leave it out", path)
                if other in seen:
                    both = "twice" if seen[other] == key else "in after and in after_any"
                    self.fail(f"{other} stands {both}; leave one of them out", path)
                seen[other] = key
                yield After(other, condition)

    def _check_references(self, stage: Stage, stages: Mapping[str, Stage]) -> None:
        """Every `{stage}` must be the id of runs that are there when the command starts."""
        path = f"stages/{stage.name}/command"
        for name in dict.fromkeys(name for word in stage.words for name in _REFERENCE.findall(word)):
            if name not in stages:
                hint = did_you_mean(near(name, stages)) or f" (stages: {', '.join(stages)})"
                self.fail(f"{{{name}}}: no stage {name}{hint}", path)
            if not stages[name].makes_runs:
                self.fail(f"{{{name}}}: the stage {name} makes no runs, so there is no id of one", path)
            if name == stage.name or name not in _before(stage, stages):
                wait = "" if name == stage.name else f"; add after: [{name}]"
                self.fail(f"{{{name}}} is used, but the stage does not wait for {name}{wait}", path)

    def in_order(self, stages: Mapping[str, Stage]) -> Iterator[Stage]:
        """The stages, every one behind those it waits for."""
        left = dict(stages)
        while left:
            ready = next((s for s in left.values() if not any(w.stage in left for w in s.waits)), None)
            if ready is None:
                names = _cycle(left)
                chain = f"{names[0]} waits for {', which waits for '.join([*names[1:], names[0]])}"
                self.fail(
                    f"the stages wait for one another: {chain}; leave one of the waits out",
                    f"stages/{names[0]}",
                )
            yield left.pop(ready.name)


def fail_at(place: str, error: RacelabError) -> NoReturn:
    """Raises an error again with the place in the file, in each of its lines."""
    raise type(error)("\n".join(f"{place}: {line}" for line in str(error).splitlines())) from error


def _before(stage: Stage, stages: Mapping[str, Stage]) -> Collection[str]:
    """Names of all the stages that have ended when this one starts."""
    found: dict[str, None] = {}
    waiting = [after.stage for after in stage.waits]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            waiting += [after.stage for after in stages[name].waits]
    return found


def _cycle(stages: Mapping[str, Stage]) -> list[str]:
    """Names of stages of which each waits for the next and the last for the first; every one of `stages` waits."""
    path: list[str] = [next(iter(stages))]
    while True:
        following = next(after.stage for after in stages[path[-1]].waits if after.stage in stages)
        if following in path:
            return path[path.index(following) :]
        path.append(following)

"""From a graph to what can start: the runs of every stage with their ids, and the batches of a launch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.configs.compose import Composed, compose
from racelab.configs.schema_launcher import InlineLauncherConfig, SlurmLauncherConfig
from racelab.experiments.errors import ConfigError, RacelabError
from racelab.sweeps.composing import last_words
from racelab.sweeps.run import Plan
from racelab.sweeps.slurm.graph import Graph, Stage, fail_at, fill, is_launcher_word
from racelab.sweeps.slurm.model import After, Batch, Task

if TYPE_CHECKING:
    from racelab.sweeps.slurm.runs import Todo

_SIZES: Final = {"launcher.nodes": (1, 1), "launcher.gpus_per_node": (0, 0)}
"""What a command may set although no backend uses it -> (least value, value of null)."""
_NULLS: Final = ("null", "~", "")


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs that a stage makes.

    Attributes:
        plan: its cells and their folders.
        single: one run by itself, of no sweep.
        reference: what stands for `{stage}`: the id of the run, or of the sweep, or the folder's path where commands
            would not look for the id.
        words: the command line that makes them.
    """

    plan: Plan
    single: bool
    reference: str
    words: tuple[str, ...]


PlanOf = Callable[[Sequence[str], Sequence[str], Sequence[str]], Runs]
"""From the words of a command that makes runs, words below its own and words above them, to its runs."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage that could start now.

    Attributes:
        stage: of the graph.
        words: of its command line, every id filled in.
        runs: what it makes; None for a command.
        launcher: of a command; None for runs, whose configs have theirs.
    """

    stage: Stage
    words: tuple[str, ...]
    runs: Runs | None
    launcher: SlurmLauncherConfig | InlineLauncherConfig | None

    @property
    def typed(self) -> tuple[str, ...]:
        """The words of its whole command line, overrides of the graph included."""
        return self.words if self.runs is None else self.runs.words

    @property
    def command(self) -> str:
        """For people."""
        return shlex.join(["racelab", *self.typed])

    @property
    def on_slurm(self) -> bool:
        """Whether it runs as jobs; all cells of one stage do or none does."""
        if self.runs is None:
            return isinstance(self.launcher, SlurmLauncherConfig)
        return isinstance(self.runs.plan.cells[0].config.launcher, SlurmLauncherConfig)


def plan_stages(
    graph: Graph, plan_of: PlanOf, more: Sequence[str], config_dirs: Sequence[Path] = ()
) -> tuple[Planned, ...]:
    """The stages in order, composed and checked.

    Args:
        graph: what to plan.
        plan_of: composes the runs of a command line.
        more: words of the command line, above all words of the file.
        config_dirs: extra config folders.

    Raises:
        ConfigError: a stage that cannot run, with its place in the file; stages that do not fit together.
    """
    _refuse_idle_words(graph, more)
    references: dict[str, str] = {}
    found = []
    for stage in graph.stages:
        words = fill(stage.words, references)
        runs = launcher = None
        try:
            if stage.makes_runs:
                runs = plan_of(words, graph.base, (*stage.launcher, *more))
                references[stage.name] = runs.reference
            else:
                asked = [word for word in (*graph.base, *stage.launcher, *more) if is_launcher_word(word)]
                launcher = command_launcher(asked, config_dirs)
        except RacelabError as error:
            fail_at(stage.place, error)
        found.append(Planned(stage, words, runs, launcher))
    _refuse_misfits(found)
    return tuple(found)


def _refuse_idle_words(graph: Graph, more: Sequence[str]) -> None:
    """A word for runs in a graph that makes none would count for nothing."""
    if any(stage.makes_runs for stage in graph.stages):
        return
    for word in (*graph.base, *more):
        if not is_launcher_word(word):
            raise ConfigError(f"{graph.file}: no stage makes runs, so {word} means nothing; leave it out")


def _refuse_misfits(stages: Sequence[Planned]) -> None:
    """Raises ConfigError for stages that cannot be of one launch."""
    first = stages[0]
    for other in stages:
        if other.on_slurm != first.on_slurm:
            here, there = (first, other) if other.on_slurm else (other, first)
            raise ConfigError(
                f"{here.stage.place}: the stage would run on this machine, and {there.stage.name} as a job; write "
                "launcher=slurm into base, for all of them"
            )
    makers = [(planned, planned.runs.plan) for planned in stages if planned.runs is not None]
    owner: dict[str, Planned] = {}
    for planned, plan in makers:
        if plan.root != makers[0][1].root:
            raise ConfigError(
                f"{planned.stage.place}: its runs go to {plan.root}, those of {makers[0][0].stage.name} to "
                f"{makers[0][1].root}; take one run.root for all stages"
            )
        for run_id in plan.run_ids:
            taken = owner.setdefault(run_id, planned)
            if taken is not planned:
                raise ConfigError(
                    f"{planned.stage.place}: the run {run_id} is one of the stage {taken.stage.name} too; leave one "
                    "of them out, or give them different seeds"
                )


def command_launcher(
    words: Sequence[str], config_dirs: Sequence[Path] = ()
) -> SlurmLauncherConfig | InlineLauncherConfig:
    """What a command asks of Slurm, by words of the launcher: one node without GPUs, unless they say more.

    A config of runs refuses what no backend would use, so nodes and GPUs are left to the backend there and put in here.

    Raises:
        ConfigError: words that do not compose.
    """
    chosen = next(
        (word for word in reversed(words) if word.partition("=")[0] == "launcher"), "launcher=inline"
    )
    if chosen == "launcher=inline":
        return compose(last_words(words), config_dirs).config.launcher
    composed = compose(last_words([*words, *(f"{key}=null" for key in _SIZES)]), config_dirs)
    launcher = composed.config.launcher
    if not isinstance(launcher, SlurmLauncherConfig):  # an option of the user's, on this machine
        return launcher
    sizes = {key.removeprefix("launcher."): _size(key, words, composed) for key in _SIZES}
    return launcher.model_copy(update=sizes)


def _size(key: str, words: Sequence[str], composed: Composed) -> int:
    """A whole number of the launcher: as the last word says, else the chosen option's file."""
    least, null = _SIZES[key]
    typed = [word.partition("=")[2] for word in words if word.partition("=")[0] == key]
    sources = composed.sources()[key]
    text = typed[-1] if typed else sources[-1].text
    if text in _NULLS:
        return null
    if not text.isdecimal() or int(text) < least:
        where = f"{key}={text}" if typed else f"{sources[-1].file}:{sources[-1].line}: {key}={text}"
        raise ConfigError(f"{where}: must be a whole number from {least}, or null")
    return int(text)


def graph_batches(stages: Sequence[Planned], left: Mapping[str, Todo]) -> tuple[Batch, ...]:
    """The batches of a launch.

    Args:
        stages: all on Slurm, in order.
        left: stage that makes runs -> its cells that are still to be submitted, and those that a job has already.
    """
    from racelab.sweeps.slurm.runs import plan_batches

    found: list[Batch] = []
    for planned in stages:
        stage = planned.stage
        after = tuple(_waits(stage, left))
        if planned.runs is None:
            assert isinstance(planned.launcher, SlurmLauncherConfig)
            task = Task("command", words=planned.words, title=stage.name, every_node=stage.every_node)
            found.append(Batch(stage.name, stage.name, (task,), planned.launcher, after))
        elif left[stage.name].cells:
            found += plan_batches(left[stage.name].cells, stage.name, after)
    return tuple(found)


def _waits(stage: Stage, left: Mapping[str, Todo]) -> Iterator[After]:
    """What a stage has to wait for: not for runs that have finished, but for those that a job of another launch has."""
    for after in stage.waits:
        todo = left.get(after.stage)
        if todo is None or todo.cells:
            yield after
        for run_id, status in () if todo is None else todo.live.items():
            if not status.job_id:
                raise ConfigError(
                    f"{stage.place}: it waits for the run {run_id}, which launch {status.launch} is about to submit; "
                    "try again when that has happened"
                )
            yield After(after.stage, after.condition, status.job_id)

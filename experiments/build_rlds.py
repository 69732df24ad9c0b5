"""Wires the parts of an RLDS run from its config. What is heavy is imported when a run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racelab.configs.schema_rlds import FrozenLakeTask, RldsRunConfig
from racelab.experiments.data.instances import InstanceStream
from racelab.experiments.episodes import Episode
from racelab.experiments.errors import DataError, UnreachableError
from racelab.experiments.methods.rlds.parts import RldsParts
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.ports import Actor, Backend, Grader, Reflector, Task
from racelab.experiments.rng import Streams
from racelab.experiments.tasks.registry import make_task
from racelab.experiments.tracking.mlflow_store import tracking_uri


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """Everything that can be wrong with the outside, found before a run folder exists.

    Attributes:
        task: opened; its data and servers are there.
        model: folder of the trained model; None for the grid model, which is made when the run starts.
        root: folder of the runs.
        lines: what to say.
    """

    task: Task
    model: Path | None
    root: Path
    lines: tuple[str, ...] = ()

    def close(self) -> None:
        """Stops what the task started."""
        self.task.close()


def find_task(config: RldsRunConfig, root: Path) -> TaskInputs:
    """Opens the task and finds the model; `root` is the folder of the runs.

    Raises:
        RacelabError: one line naming the file, key, package or server that is missing or wrong.
    """
    if config.backend.name != "local":
        raise UnreachableError(
            f"backend={config.backend.name} is not in racelab yet; backend=local runs every method on one device"
        )
    if config.tracking.mlflow:
        tracking_uri(root, config.tracking.uri or None)
    m = config.model
    model = None if m.engine == "grid" else resolve_model(m.source, sha256=m.sha256, revision=m.revision)
    task = make_task(config.task)
    try:
        train, held = len(task.train()), len(task.validation())
        if train < config.task.prompts_per_step:
            raise DataError(
                f"{train} training examples are fewer than task.prompts_per_step={config.task.prompts_per_step}; "
                "lower it or give more data"
            )
    except BaseException:
        task.close()
        raise
    return TaskInputs(
        task, model, root, (f"{config.task.name}: {train} training and {held} validation examples",)
    )


def build_parts(config: RldsRunConfig, inputs: TaskInputs, note: Callable[[str], None]) -> RldsParts:
    """The parts of a run. The grid model is warmed up here, if no run of this seed has done it before."""
    import torch

    from racelab.experiments.backends.local.learner import LocalBackend
    from racelab.experiments.learning import learner_settings

    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    policy, make_actor = _grid(config, inputs, note) if inputs.model is None else _text(config, inputs)
    backend = LocalBackend(policy, learner_settings(config))
    return RldsParts(
        actor=make_actor(backend.policy),
        grader=_grader(config, inputs.task, backend),
        reflector=_reflector(config, inputs.task, backend),
        task=inputs.task,
        backend=backend,
        stream=InstanceStream(inputs.task.train(), config.run.seed),
        rng=Streams(config.run.seed),
        seed=config.run.seed,
    )


MakeActor = Callable[[Any], Actor]


def _text(config: RldsRunConfig, inputs: TaskInputs) -> tuple[Any, MakeActor]:
    """A language model that plays in text."""
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.models.text_actor import TextActor
    from racelab.experiments.needs import torch_device

    m, t = config.model, config.task
    assert inputs.model is not None
    assert m.engine != "grid"
    policy = open_language_model(
        inputs.model,
        role="policy",
        engine=m.engine,
        compute_dtype=m.compute_dtype,
        device=torch_device(m.device),
        train_from_layer=m.train_from_layer,
    )

    def actor(model: Any) -> Actor:
        return TextActor(
            model,
            inputs.task,
            max_turns=t.max_turns,
            max_prompt_tokens=t.max_prompt_tokens,
            max_response_tokens=t.max_response_tokens,
            max_turn_tokens=t.max_turn_tokens,
            placement=config.method.reflect.placement,
            prompt_rewrite=config.method.prompt_rewrite,
        )

    return policy, actor


def _grid(config: RldsRunConfig, inputs: TaskInputs, note: Callable[[str], None]) -> tuple[Any, MakeActor]:
    """The small transformer that plays FrozenLake on grid tokens."""
    from racelab.experiments.backends.local.grid import open_grid_model
    from racelab.experiments.tasks.frozenlake.grid_actor import GridActor
    from racelab.experiments.warmup import grid_folder

    assert isinstance(config.task, FrozenLakeTask)
    assert config.model.grid is not None
    note("the grid model (warmed up on random walks, once for each seed)")
    folder = grid_folder(config.model.grid, config.task, config.run.seed, inputs.root)
    policy = open_grid_model(folder, role="policy")
    return policy, lambda model: GridActor(model, max_turns=config.task.max_turns)


def _grader(config: RldsRunConfig, task: Task, backend: Backend) -> Grader | None:
    m, r = config.method, config.method.reflect
    if not m.grades:
        return None
    if m.grader == "scripted":
        from racelab.experiments.tasks.frozenlake.scripted import ScriptedGrader

        return ScriptedGrader()
    if m.grader == "form":
        from racelab.experiments.models.forms import FormGrader

        return FormGrader(backend.policy, task.subtasks, temperature=r.temperature)
    from racelab.experiments.models.grading import PolicyGrader, RandomGrader

    if m.grader == "random":
        return RandomGrader(task.subtasks)
    return PolicyGrader(
        backend.policy, task.subtasks, max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p
    )


def _reflector(config: RldsRunConfig, task: Task, backend: Backend) -> Reflector | None:
    m, r = config.method, config.method.reflect
    if not r.max_retries:
        return None
    if m.reflector == "scripted":
        from racelab.experiments.tasks.frozenlake.scripted import ScriptedReflector

        return ScriptedReflector() if config.model.engine == "grid" else ScriptedReflector(say=_sentence)
    if m.reflector == "form":
        from racelab.experiments.models.forms import FormReflector

        return FormReflector(
            backend.policy,
            task.subtasks,
            max_tokens=r.max_tokens,
            temperature=r.temperature,
            top_p=r.top_p,
            single_pass=m.grading == "single_pass",
        )
    from racelab.experiments.models.reflection import PolicyReflector

    return PolicyReflector(
        backend.policy,
        task.subtasks,
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        single_pass=m.grading == "single_pass",
        prompt_rewrite=m.prompt_rewrite,
    )


def _sentence(action: str, episode: Episode) -> str:
    """The scripted reflector's hint, for a model that reads."""
    return f"From the step at hand on, first move {action}."

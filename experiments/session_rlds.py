"""An RLDS run: parts, the validation slice before, the loop with the slice every few updates, the slice after."""

from __future__ import annotations

import time
from collections.abc import Sequence

from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.attempt import Talk, TrainAttempt
from racelab.experiments.build_rlds import TaskInputs, build_parts
from racelab.experiments.checkpoint import Checkpoint
from racelab.experiments.data.instances import instances_digest
from racelab.experiments.episodes import AgentSampling, Episode, Instance, Start
from racelab.experiments.errors import DataError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.methods.rlds.parts import RldsParts
from racelab.experiments.methods.rlds.step import Rlds
from racelab.experiments.rng import torch_generator
from racelab.experiments.run import Hooks, LoopSettings, loop
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

UNTRAINED, TRAINED = "untrained", "trained"
_WAVE = 256
"""Validation episodes played together; between two waves a stop request is looked for."""


class RldsSession(TrainAttempt):
    """Runs one attempt on one folder. The caller made the folder (or found it) and keeps the inputs."""

    def __init__(
        self, config: RldsRunConfig, folder: RunFolder, inputs: TaskInputs, talk: Talk, stop: StopRequest
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        super().__init__(config, folder, inputs, talk, stop)
        self.config, self.task_inputs = config, inputs

    def _work(self, tracker: SpoolTracker, checkpoint: Checkpoint | None) -> tuple[str, str, int]:
        try:
            return self._train(tracker, checkpoint)
        finally:
            self.task_inputs.close()

    def _train(self, tracker: SpoolTracker, checkpoint: Checkpoint | None) -> tuple[str, str, int]:
        for line in self.task_inputs.lines:
            self.talk.note(line)
        parts = build_parts(self.config, self.task_inputs, self.talk.note)
        if self.stop.signum:
            return self._stopped(checkpoint.step if checkpoint else 0)
        held = self._held(parts)
        self._remember(parts, held)
        method = Rlds(self.config, parts)
        progress = self._progress(method, parts, checkpoint)
        if progress.state.step == 0 and not self._look(parts, held, tracker, UNTRAINED, 0):
            return self._stopped(0)
        c = self.config
        progress = loop(
            LoopSettings(c.validation.every, c.checkpoint.every, c.eval.at_steps),
            method,
            parts,
            progress,
            tracker=tracker,
            store=self.store,
            stop=self.stop,
            hooks=Hooks(
                self.talk.show,
                self.talk.note,
                lambda step: self._glance(parts, held, tracker, step),
                lambda record, last: "",
                lambda label, step: None,
            ),
        )
        step: int = progress.state.step
        if not method.done(progress.state) or not self._look(parts, held, tracker, TRAINED, step):
            return self._stopped(step)
        tracker.tags({"end_reason": "budget"})
        self.talk.finish(self.folder)
        return "finished", "", step

    def _held(self, parts: RldsParts) -> Sequence[Instance]:
        """The fixed slice."""
        return parts.task.validation()[: self.config.validation.examples]

    def _remember(self, parts: RldsParts, held: Sequence[Instance]) -> None:
        """Writes down, once, what the run was made of; a run that goes on must find the same data."""
        file = self.folder.path / "setup.json"
        digest = instances_digest([*parts.task.train(), *held])
        if file.exists():
            if read_json(file).get("data") != digest:
                raise DataError(
                    f"{file} was written with other examples; put the data of task={self.config.task.name} back as it "
                    "was, or start a new run"
                )
            return
        stored = {
            "data": digest,
            "n_train": len(parts.task.train()),
            "n_validation": len(held),
            "task": parts.task.describe(),
            "subtasks": [[s.name, s.weight] for s in parts.task.subtasks],
            "base": parts.backend.state_meta(),
        }
        write_json_atomic(file, stored)

    def _glance(self, parts: RldsParts, held: Sequence[Instance], tracker: SpoolTracker, step: int) -> bool:
        """In the middle of training; left out at the last step, which has the view after training.

        False if asked to stop meanwhile.
        """
        return step >= self.config.budget or self._look(parts, held, tracker, f"step {step}", step)

    def _look(
        self, parts: RldsParts, held: Sequence[Instance], tracker: SpoolTracker, label: str, step: int
    ) -> bool:
        """Plays the slice, and writes all of it in one piece. False if asked to stop meanwhile: nothing is written."""
        started = time.perf_counter()
        if label in (UNTRAINED, TRAINED):
            self.talk.note(f"validation of the {label} model on {len(held)} examples")
        sampling = AgentSampling(self.config.validation.temperature, self.config.task.top_p)
        rng = torch_generator(self.config.run.seed, "rlds-validation")
        episodes: list[Episode] = []
        for k in range(0, len(held), _WAVE):
            if self.stop.signum:
                return False
            played = parts.actor.play([Start(x) for x in held[k : k + _WAVE]], sampling, rng)
            episodes += [episode for episode in played if episode is not None]
        parts.task.metrics()  # counters of the validation are not those of the next step
        rows = [validation_row(step, label, episode) for episode in episodes]
        metrics = validation_metrics(self.config.task.name, episodes)
        metrics["perf/time/validate_s"] = time.perf_counter() - started
        tracker.record(StepRecord(step, metrics, {"val_examples": rows}))
        if episodes:
            name = self.config.task.name
            reward, solved = (metrics[f"val/{name}/{key}"] for key in ("reward_mean", "solved_frac"))
            self.talk.note(f"validation after update {step}: reward={reward:.3f}  solved={solved:.3f}")
        return True


def validation_row(step: int, label: str, episode: Episode) -> dict[str, object]:
    """A row of `val_examples`."""
    result = episode.result
    return {
        "step": step,
        "task": episode.instance.task,
        "example_id": episode.instance.instance_id,
        "model": label,
        "reward": result.reward,
        "solved": result.solved,
        "end_reason": result.end_reason,
        "turns": len(episode.turns),
        "n_tokens": episode.n_response_tokens,
    }


def validation_metrics(task: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """`val/<task>`: mean reward, share of solved examples, mean turns, number."""
    n = len(episodes)
    if not n:
        return {f"val/{task}/n": 0.0}
    return {
        f"val/{task}/n": float(n),
        f"val/{task}/reward_mean": sum(e.reward for e in episodes) / n,
        f"val/{task}/solved_frac": sum(e.result.solved for e in episodes) / n,
        f"val/{task}/turns_mean": sum(len(e.turns) for e in episodes) / n,
    }

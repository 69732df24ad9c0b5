"""A RACE run, or one of its baselines: parts, the view before, the loop, the view after.

What a resumed run must not measure again (judge scales, fixed rubrics) is stored in `setup.json` before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from racelab.configs.schema import Config
from racelab.experiments import validation
from racelab.experiments.attempt import Talk, TrainAttempt
from racelab.experiments.build import Inputs, build_parts, calibrated, ruler
from racelab.experiments.checkpoint import Checkpoint
from racelab.experiments.data.stream import data_digest
from racelab.experiments.errors import DataError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.methods.registry import make_method
from racelab.experiments.models.generator import Generator
from racelab.experiments.models.redundancy import make_redundancy
from racelab.experiments.needs import describe, equip, redundancy_chat
from racelab.experiments.parts import Parts
from racelab.experiments.probe import RubricProbe, due, rubric_weights
from racelab.experiments.run import Hooks, LoopSettings, loop
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import Rubric, StepRecord


class RaceSession(TrainAttempt):
    """Runs one attempt on one folder. The caller made the folder (or found it) and keeps the inputs."""

    def __init__(
        self, config: Config, folder: RunFolder, inputs: Inputs, talk: Talk, stop: StopRequest
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        super().__init__(config, folder, inputs, talk, stop)
        self.config = config
        self.setup_file = folder.path / "setup.json"

    def _work(self, tracker: SpoolTracker, checkpoint: Checkpoint | None) -> tuple[str, str, int]:
        parts, prompts, lines = build_parts(self.config, self.inputs)
        for line in (*self.inputs.lines, *lines):
            self.talk.note(line)
        if self.stop.signum:
            return self._stopped(checkpoint.step if checkpoint else 0)
        parts, held = self._setup(parts, prompts)
        parts, lines = equip(parts, self.config, self.inputs.needs, self.folder.path)
        for line in lines:
            self.talk.note(line)
        self._keep(describe(parts, self.config))
        method = make_method(self.config, parts)
        progress = self._progress(method, parts, checkpoint)
        probe = self._prober(parts)
        if progress.state.step == 0:
            if not self._look(parts, held, tracker, validation.UNTRAINED, 0):
                return self._stopped(0)
            progress.owed = due(self.config.probe.at_steps, 0)
        hooks = Hooks(
            self.talk.show,
            self.talk.note,
            lambda step: self._glance(parts, held, tracker, step),
            probe.due,
            lambda label, step: self._probe(probe, parts, tracker, label, step),
        )
        c = self.config
        progress = loop(
            LoopSettings(
                c.validation.every, c.checkpoint.every, c.eval.at_steps, {"samples": c.run.samples_every}
            ),
            method,
            parts,
            progress,
            tracker=tracker,
            store=self.store,
            stop=self.stop,
            hooks=hooks,
        )
        step: int = progress.state.step
        if not method.done(progress.state):
            # On resume this row lies behind the checkpoint's place in the spool, and is dropped.
            tracker.rows("phases", method.finish(progress.state, "interrupted"))
            return self._stopped(step)
        last = method.finish(progress.state, "budget")
        if not self._look(parts, held, tracker, validation.TRAINED, step, {"phases": last}):
            return self._stopped(step)
        tracker.tags({"end_reason": "budget"})
        self.talk.finish(self.folder)
        return "finished", "", step

    def _setup(self, parts: Parts, prompts: Any) -> tuple[Parts, validation.HeldOut]:
        """The judge's scales and the fixed rubrics: measured once, then stored with the run."""
        known = read_json(self.setup_file) if self.setup_file.exists() else None
        judge = calibrated(parts, self.config, prompts, known["calibration"] if known else None)
        parts = replace(parts, judge=judge)
        digest = data_digest((*prompts.train, *prompts.heldout))
        if known and known["data"] != digest:
            raise DataError(
                f"{self.setup_file} was written with other prompts; put the data of {self.config.data.source} back as "
                "it was, or start a new run"
            )
        if known:
            return parts, validation.HeldOut.from_state(prompts.heldout, known["heldout"])
        held = validation.hold_rubrics(prompts.heldout, ruler(parts, self.config), self.config.run.seed)
        description = judge.describe()
        stored = {
            "calibration": description.get("calibration"),
            "judge": description,
            "data": digest,
            "heldout": held.state(),
            "train_ids": [p.prompt_id for p in prompts.train],
        }
        write_json_atomic(self.setup_file, stored)
        return parts, held

    def _keep(self, made: dict[str, object]) -> None:
        """Writes down, once, who scores and writes rubrics beside the judge."""
        stored = read_json(self.setup_file)
        if made and "parts" not in stored:
            write_json_atomic(self.setup_file, {**stored, "parts": made})

    def _look(
        self,
        parts: Parts,
        held: validation.HeldOut,
        tracker: SpoolTracker,
        label: str,
        step: int,
        more: Mapping[str, list[dict[str, object]]] | None = None,
    ) -> bool:
        """The whole view: every temperature and the judge's report. False if asked to stop meanwhile.

        Nothing is written before everything is there, and then in one piece (with the rows of `more`).
        """
        cfg = self.config.validation
        model = parts.untrained if label == validation.UNTRAINED else parts.generator
        started = time.perf_counter()
        rows: list[validation.Row] = []
        metrics: dict[str, float] = {}
        for temperature in cfg.temperatures:
            if self.stop.signum:
                return False
            self.talk.note(f"held-out view of the {label} model at temperature {temperature:g}")
            parts.forget()
            view = self._view(model, parts, held, temperature, step, label)
            rows += view.rows
            if temperature == cfg.temperatures[0]:
                metrics |= validation.validation_metrics(view.rows)
                if cfg.judge_report:
                    with rubric_weights(parts.backend):
                        now = validation.rubrics_now(model, held.prompts, self.config.run.seed)
                    metrics |= self._judge_metrics(parts, held, view, now, label)
        metrics["perf/time/validate_s"] = time.perf_counter() - started
        tables = {"val_examples": rows, **(more or {})}
        tracker.record(StepRecord(step, metrics, tables))
        return True

    def _view(
        self,
        model: Generator,
        parts: Parts,
        held: validation.HeldOut,
        temperature: float,
        step: int,
        label: str,
    ) -> validation.View:
        return validation.evaluate(
            model,
            held,
            parts.judge,
            samples=self.config.validation.samples,
            temperature=temperature,
            seed=self.config.run.seed,
            step=step,
            label=label,
        )

    def _judge_metrics(
        self,
        parts: Parts,
        held: validation.HeldOut,
        view: validation.View,
        now: Sequence[Rubric | None],
        label: str,
    ) -> dict[str, float]:
        """The judge under the fixed rubrics and, on the same responses, under those that the model writes now."""
        report = validation.ranking(parts.judge, held, view, now)
        report = {f"{k}_now": v for k, v in report.items()}
        if label == validation.UNTRAINED:
            report |= validation.report_on_judge(parts.judge, held, view)
        else:
            report |= validation.ranking(parts.judge, held, view, held.rubrics)
        return {f"race/judge/{k}": v for k, v in report.items() if v == v}

    def _glance(self, parts: Parts, held: validation.HeldOut, tracker: SpoolTracker, step: int) -> bool:
        """The first temperature only, in the middle of training. Always taken to its end: True."""
        parts.forget()
        temperature = self.config.validation.temperatures[0]
        view = self._view(parts.generator, parts, held, temperature, step, f"step {step}")
        tracker.rows("val_examples", view.rows)
        tracker.metrics(step, validation.validation_metrics(view.rows))
        return True

    def _prober(self, parts: Parts) -> RubricProbe:
        """The rubric probe of this run."""
        cfg = self.config.probe
        redundancy = make_redundancy(
            cfg.redundancy,
            encoder=parts.encoder,
            cosine=cfg.redundancy_cosine,
            chat=redundancy_chat(parts, self.config),
        )
        return RubricProbe(cfg, self.config.run.seed, redundancy)

    def _probe(self, probe: RubricProbe, parts: Parts, tracker: SpoolTracker, label: str, step: int) -> None:
        """One rubric probe, written in one piece."""
        self.talk.note(f"rubric probe ({label})")
        parts.forget()
        tracker.record(probe.take(parts.generator, parts.backend, parts.judge, label=label, step=step))

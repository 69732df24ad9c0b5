"""`racelab cancel` and `racelab resume`: stopping what was launched, and going on with what was left unfinished."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.analysis.rlds_words import counted
from racelab.cli.console import print_json, print_table, say
from racelab.cli.launching import print_submitted
from racelab.cli.train import reference, run_root
from racelab.configs.compose import compose, read_composed
from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunFolder

if TYPE_CHECKING:
    from racelab.sweeps.slurm.status import TaskStatus
    from racelab.sweeps.slurm.targets import Target


def cancel(run: str, downstream: bool, root: Path | None, json_output: bool) -> int:
    """Cancels what is live of a run, sweep or launch. JSON: {run_id, title, job_id} of each task cancelled."""
    from racelab.sweeps.slurm import cancel as cancelling
    from racelab.sweeps.slurm.scheduler import Scheduler
    from racelab.sweeps.slurm.targets import find, with_earlier

    named = find(run_root(str(root) if root else ""), run)
    target = with_earlier(named)
    scheduler = Scheduler()
    meant, everything = target.tasks(scheduler)
    meant += target.leftovers(everything)
    if not named.launches and not meant:
        raise ConfigError(_without_job(named))
    if downstream:
        meant = cancelling.with_downstream(target, meant, everything)
    done = cancelling.cancel(target, meant, scheduler)
    if not named.launches:
        say(f"warning: {_without_job(named)}")
    if json_output:
        print_json([{"run_id": s.run_id or None, "title": s.title, "job_id": s.job_id} for s in done])
        return 0
    if not done:
        say(f"nothing of {run} is running or waiting")
        return 0
    print_table(["run", "job", "was"], [[s.run_id or s.title, s.job_id or "-", s.state] for s in done])
    where = ["--root", str(root)] if root else []
    again = shlex.join(["racelab", "resume", run, *where])
    say(f"{counted(len(done), 'job')} cancelled; go on with: {again}")
    return 0


def _without_job(target: Target) -> str:
    """How a run stands that is no job's, for one who wants it cancelled."""
    run = target.run
    assert run is not None
    holder = run.holder() or {}
    if run.is_held():
        return (
            f"no job has {run.run_id}: pid {holder.get('pid')} on host {holder.get('host')} runs it; stop it there "
            f"with `kill {holder.get('pid')}`"
        )
    return f"no job has {run.run_id}, and nobody works on it; there is nothing to cancel"


def resume(
    run: str, overrides: Sequence[str], config_dirs: Sequence[Path], root: Path | None, json_output: bool
) -> int:
    """Goes on with what is unfinished: as jobs what was launched, here what was started here.

    JSON: {launch, sweep, path, jobs: [{run_id, title, batch, job_id}]} of the new jobs; launch null and jobs empty
    where there is nothing to do. What goes on here prints what its command prints.
    """
    from racelab.sweeps.slurm.targets import find

    _refuse_other_words(overrides)
    target = find(run_root(str(root) if root else ""), run)
    if target.launches:
        return _again(run, target, overrides, config_dirs, json_output)
    assert target.run is not None
    if list(overrides) == ["launcher=inline"]:
        return _here(target.run, json_output)
    if any(word.partition("=")[0] == "launcher" for word in overrides) or _was_to_be_a_job(target.run):
        return _first_time(target.run, overrides, config_dirs, json_output)
    if overrides:
        raise ConfigError(
            f"{run} runs here, and {shlex.join(overrides)} is for jobs; add launcher=slurm, or leave it out"
        )
    return _here(target.run, json_output)


def _was_to_be_a_job(run: RunFolder) -> bool:
    """Whether a submitter died between making the run's folder and the launch's."""
    return run.info().get("kind") != "sweep" and bool(run.info().get("launch"))


def _refuse_other_words(overrides: Sequence[str]) -> None:
    """A run goes on with its own config: only where it runs may change."""
    for word in overrides:
        key = word.partition("=")[0]
        if key != "launcher" and not key.startswith("launcher."):
            raise ConfigError(
                f"{word}: a run goes on with the config that it started with; only launcher=... and launcher.KEY=... "
                "may change"
            )


def _asked(
    overrides: Sequence[str], config_dirs: Sequence[Path], before: SlurmLauncherConfig
) -> SlurmLauncherConfig:
    """An allocation with the changes that words of the launcher make to it.

    A preset among them replaces all of it; the nodes and GPUs that it leaves open stay as they are.

    Raises:
        ConfigError: words that do not compose.
    """
    from racelab.sweeps.composing import last_words
    from racelab.sweeps.slurm.stages import command_launcher

    typed = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    words = last_words(overrides)
    if "launcher" not in typed:  # beside what the schema compares with it
        kept = [f"launcher.{key}={getattr(before, key)}" for key in ("time_min", "signal_delay_s")]
        if typed.get("launcher.container.kind") != "none":
            inside = before.container.model_dump(mode="json")
            kept += [f"launcher.container.{key}={json.dumps(value)}" for key, value in inside.items()]
        words = last_words(["launcher=slurm", *kept, *overrides])
    asked = command_launcher(words, config_dirs)
    if not isinstance(asked, SlurmLauncherConfig):
        raise ConfigError("launcher=inline: to go on here, racelab train --resume RUN")
    keys = type(asked).model_fields if "launcher" in typed else {key.split(".")[1] for key in typed}
    new = {key: getattr(asked, key) for key in keys}
    for key, open_value in _OPEN.items():
        given = typed.get(f"launcher.{key}")
        if given in ("null", "~", "") or (given is None and getattr(asked, key) == open_value):
            new.pop(key, None)
    return before.model_copy(update=new)


_OPEN: Final = {"nodes": 1, "gpus_per_node": 0}
"""What `command_launcher` makes of a size that nobody gives."""


def _again(
    named: str, target: Target, overrides: Sequence[str], config_dirs: Sequence[Path], json_output: bool
) -> int:
    """A new launch of what is neither finished nor live."""
    from racelab.sweeps.slurm.runs import relaunch
    from racelab.sweeps.slurm.scheduler import Scheduler
    from racelab.sweeps.slurm.status import is_ours
    from racelab.sweeps.slurm.submit import recover

    if "launcher=inline" in overrides:
        raise ConfigError(f"jobs have {named}; to go on with a run of it here: racelab train --resume RUN")
    scheduler = Scheduler()
    for folder in target.launches:
        if not is_ours(folder):
            if not folder.is_settled():
                say(f"launch {folder.uid} is {folder.owner()}'s; its owner's `racelab jobs` submits it")
            continue
        try:
            for line in recover(folder, scheduler):
                say(line)
        except ConfigError as error:  # the words may mend it: what was refused is submitted again below
            say(f"warning: {error}")
    meant, everything = target.tasks(scheduler)
    live = [status for status in meant if status.live]
    ended = [status for status in meant if not status.live and status.state != "finished"]
    left = [s for s in ended if not s.run_id or (Path(s.path) / "run.json").is_file()]
    for status in ended:
        if status not in left:
            say(f"the folder of {status.run_id} is gone; it is left out")
    _say_live(live, len(meant) - len(live) - len(ended))
    _say_others(target, meant)
    if not left:
        return _nothing(named, json_output)
    root = target.launches[0].path.parent.parent
    chosen = [(target.folder(status), status) for status in left]
    command = shlex.join(["racelab", "resume", named, *overrides])

    @functools.cache
    def changed(before: str) -> SlurmLauncherConfig:
        return _asked(overrides, config_dirs, SlurmLauncherConfig.model_validate_json(before))

    folder = relaunch(
        root, chosen, everything, lambda old: changed(old.model_dump_json()), scheduler, say, command
    )
    print_submitted(folder, folder.launch().sweep, json_output)
    return 0


def _nothing(named: str, json_output: bool) -> int:
    say(f"nothing to resume of {named}")
    if json_output:
        print_json({"launch": None, "sweep": None, "path": None, "jobs": []})
    return 0


def _say_live(live: Sequence[TaskStatus], finished: int) -> None:
    if live:
        jobs = ", ".join(status.job_id or status.title for status in live[:5])
        more = f" and {len(live) - 5:,} more" if len(live) > 5 else ""
        say(f"{counted(len(live), 'job')} {'is' if len(live) == 1 else 'are'} live already: {jobs}{more}")
    if finished:
        say(f"{counted(finished, 'job')} finished before")


def _say_others(target: Target, meant: Sequence[TaskStatus]) -> None:
    """Cells of a sweep that no launch has: they were taken by hand, or never launched."""
    if target.run is None:
        return
    for run_id in sorted(target.runs - {status.run_id for status in meant}):
        path = target.run.path.parent / run_id
        there = (path / "run.json").is_file()
        status = RunFolder.open(path).status() if there else "not there yet"
        mend = (
            f"racelab resume {reference(RunFolder(path, run_id))}" if there else target.run.info()["command"]
        )
        if status not in ("finished", "running"):
            say(f"{run_id} is {status}, and no launch has it; go on with: {mend}")


def _first_time(
    folder: RunFolder, overrides: Sequence[str], config_dirs: Sequence[Path], json_output: bool
) -> int:
    """A run that was started here goes on as a job."""
    from racelab.sweeps.slurm.runs import refuse_held, refuse_misfit, requeue_folder
    from racelab.sweeps.slurm.scheduler import Scheduler
    from racelab.sweeps.slurm.submit import (
        assignments,
        checked,
        new_launch,
        prepare,
        run_batch,
        submit_launch,
    )

    if folder.info().get("kind") == "sweep":
        raise ConfigError(
            f"{folder.run_id} is a sweep that was started here; go on as jobs with its own command and launcher=slurm: "
            f"{folder.info().get('command')} {shlex.join(overrides)}"
        )
    if folder.status() == "finished":
        return _nothing(folder.run_id, json_output)
    refuse_held(folder)
    config = read_composed(folder.path / "config" / "composed.yaml").config
    stored = config.launcher
    if not isinstance(stored, SlurmLauncherConfig):
        stored = _default(config_dirs)
    asked = _asked(overrides, config_dirs, stored.resolved(config.backend))
    refuse_misfit(folder, asked)
    title = str(folder.info()["name"])
    command = shlex.join(["racelab", "resume", folder.run_id, *overrides])
    batch = run_batch("train", [(folder.run_id, title)], asked)
    launch = new_launch(title, command, folder.path.parent, [batch])
    scheduler = Scheduler()
    checked(launch, scheduler, say)
    launch = prepare(launch)
    requeue_folder(folder, assignments(launch)[folder.run_id])
    print_submitted(submit_launch(launch, scheduler, say), "", json_output)
    return 0


def _default(config_dirs: Sequence[Path]) -> SlurmLauncherConfig:
    launcher = compose(["launcher=slurm"], config_dirs).config.launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    return launcher


def _here(folder: RunFolder, json_output: bool) -> int:
    """In this terminal: a run at its checkpoint, a sweep by its own command."""
    info = folder.info()
    if info.get("kind") != "sweep":
        from racelab.cli.train import train

        return train([], str(folder.path), None, 1, False, False, [], json_output)
    from racelab.cli.main import run_words

    words = shlex.split(str(info.get("command") or ""))[1:]
    if not words:
        raise ConfigError(f"{folder.path / 'run.json'} does not say the sweep's command; type it again")
    started_in = Path(str(info.get("cwd") or ""))
    if started_in.is_absolute() and started_in.is_dir():
        os.chdir(started_in)
    say(f"going on with: {info['command']}")
    return run_words([*words, *(["--json"] if json_output else [])])

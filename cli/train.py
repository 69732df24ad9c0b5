"""`racelab train`: compose, check, run, and say what happened."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.cli.console import print_json, results, say
from racelab.cli.panel import make_display
from racelab.configs.check import reachability
from racelab.configs.compose import Composed, compose, read_composed
from racelab.configs.idle_eval import refuse_idle
from racelab.configs.schema import Config
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_launcher import SlurmLauncherConfig, asked_of_slurm
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.errors import ConfigError

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder
    from racelab.experiments.session import Outcome


_SHOWN_CELLS = 3


def train(
    overrides: Sequence[str],
    resume: str | None,
    seeds: str | None,
    jobs: int,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """One run, a sweep over seeds, or a run that goes on. Returns the exit code."""
    if resume is not None:
        return _resume(
            resume, [*overrides, *_given(seeds, jobs, fresh), *["--dry-run"] * dry_run], json_output
        )
    if seeds is not None:
        return _train_seeds(overrides, seeds, jobs, fresh, dry_run, config_dirs, json_output)
    if _planning():
        return _train_seeds(overrides, None, jobs, fresh, dry_run, config_dirs, json_output)
    if jobs > 1 or fresh:
        raise ConfigError("--jobs and --fresh are for several runs; add --seeds 0,1,2, or leave them out")
    composed = compose(overrides, config_dirs)
    if isinstance(composed.config, EvalRunConfig):
        refuse_idle(overrides, composed.config)
    launcher = asked_of_slurm(composed.config.launcher, composed.config.backend)
    if dry_run:
        return _dry_run(composed, launcher, json_output)
    if launcher is not None:
        from racelab.cli.launching import submit_train

        return submit_train(composed, launcher, json_output)
    code, result = _start(composed, json_output)
    with results():
        if json_output:
            print_json(result)
    return code


def _planning() -> bool:
    from racelab.cli.sweep import is_planning

    return is_planning()


def _given(seeds: str | None, jobs: int, fresh: bool) -> list[str]:
    """The options of a sweep that were given."""
    return [*["--seeds"] * (seeds is not None), *["--jobs"] * (jobs > 1), *["--fresh"] * fresh]


def _train_seeds(
    overrides: Sequence[str],
    seeds: str | None,
    jobs: int,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """A sweep with a cell per seed, named after the run; of one cell, with the config's seed, for None."""
    from racelab.cli.sweep import Options, run_cells, seeded

    given = parse_seeds(seeds)
    config = compose(overrides, config_dirs).config
    name = config.run.name or config.title
    options = Options(jobs, False, fresh, dry_run, tuple(config_dirs), json_output)
    command = ["train", *options.words(seeds), *overrides]
    return run_cells(name, command, seeded(name, overrides, given), options)


def run_root(configured: str) -> Path:
    """`run.root`, else $RACELAB_HOME/runs, else ./runs."""
    if configured:
        return Path(configured).expanduser().absolute()
    home = os.environ.get("RACELAB_HOME")
    return (Path(home).expanduser() / "runs" if home else Path("runs")).absolute()


def parse_seeds(text: str | None) -> list[int] | None:
    """The seeds of `--seeds 0,1,2`; None without the option.

    Raises:
        ConfigError: no list of whole numbers from 0, or one stands twice.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ConfigError(f"--seeds {text!r} is no list of whole numbers; write --seeds 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {text} names a seed twice")
    return seeds


def _dry_run(composed: Composed, launcher: SlurmLauncherConfig | None, json_output: bool) -> int:
    """What would run, where, after every check that needs neither a model nor the network."""
    c = composed.config
    if isinstance(c, Config) and c.data.source != "hub":
        from racelab.experiments.data.load import load_prompts

        load_prompts(c.data, c.run.seed)
    elif isinstance(c, RldsRunConfig):
        from racelab.sweeps.inputs import check_task

        check_task(c)
    findings = reachability(c)
    row = {
        **c.facts(),
        "backend": c.backend.name,
        "nodes": c.backend.nodes if launcher is None else launcher.nodes,
        "gpus": c.backend.gpus if launcher is None else launcher.gpus,
        "launcher": c.launcher.name,
        "root": str(run_root(c.run.root)),
        "config_sha256": composed.sha256,
    }
    if launcher is not None:
        from racelab.cli.launching import print_dry, refuse_credentials, train_launch

        refuse_credentials([c.tracking.uri])
        say(_line(row))
        print_dry(train_launch(composed, launcher, "RUN"), json_output)
        for finding in findings:
            say(finding.line())
    elif json_output:
        print_json([{**row, "findings": [f.line() for f in findings]}])
    else:
        print(_line(row))
        for finding in findings:
            say(finding.line())
    return 2 if any(f.severity == "error" for f in findings) else 0


def _line(row: Mapping[str, object]) -> str:
    """`key=value` words; an RLDS run's updates as its config calls them."""
    names = {"policy_updates": "updates"} if row["paper"] == "rlds" else {}
    return " ".join(f"{names.get(k, k)}={v}" for k, v in row.items() if v not in ("", None))


_SPIN = "1000"
"""GOMP_SPINCOUNT: idle OpenMP threads sleep sooner. Alone a step is up to a tenth slower than with the default; beside
one other busy process on two cores the default makes it four times slower, this about two (bench/README.md)."""


def calm_threads() -> None:
    """Idle compute threads of this process are to sleep; to be called before torch is first imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN)


def _start(composed: Composed, json_output: bool) -> tuple[int, dict[str, Any]]:
    from racelab.experiments.session import new_run, prepare

    check_reach(composed)
    root = run_root(composed.config.run.root)
    inputs = prepare(composed.config, root)
    folder = new_run(
        composed.config,
        root=root,
        composed_yaml=composed.yaml,
        overrides=list(composed.overrides),
        command=shlex.join(["racelab", "train", *composed.overrides]),
    )
    return _attempt(composed, folder, inputs, json_output)


def check_reach(composed: Composed) -> None:
    """Says what the controllers cannot reach; refuses what could not train at all."""
    findings = reachability(composed.config)
    errors = [f.line().removeprefix("error: ") for f in findings if f.severity == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    for finding in findings:
        say(finding.line())


def _resume(run: str, others: Sequence[str], json_output: bool) -> int:
    if others:
        raise ConfigError(
            f"--resume goes on with the config stored with the run; leave {' '.join(others)} out"
        )
    return resume_run(run, json_output)


def resume_run(run: str, json_output: bool, kind: str | None = None) -> int:
    """Goes on with a run that is there. Returns the exit code.

    Args:
        run: id, prefix, name, path or latest.
        json_output: JSON on stdout, no talk.
        kind: what it must be (`eval`); None: anything that is one run.
    """
    from racelab.analysis.summary import stored_summary
    from racelab.experiments.session import prepare
    from racelab.sweeps.manifest import resolve

    folder = resolve(run_root(""), run)
    if kind is not None and (found := folder.info().get("kind")) != kind:
        raise ConfigError(
            f"{folder.run_id} is no evaluation (its kind is {found}); go on with it by `racelab resume "
            f"{reference(folder)}`"
        )
    if folder.info().get("kind") == "sweep":
        raise ConfigError(f"{folder.run_id} is a sweep; go on with: {folder.info().get('command')}")
    if folder.status() == "finished":
        say(f"run {folder.run_id} has finished; `racelab show {reference(folder)}` shows it")
        if json_output:
            print_json({**(stored_summary(folder) or {}), "run_id": folder.run_id, "status": "finished"})
        return 0
    composed = read_composed(folder.path / "config" / "composed.yaml")
    started_in = Path(str(folder.info().get("cwd", "")))
    if started_in.is_absolute() and started_in.is_dir():
        os.chdir(started_in)  # relative paths in the config mean what they meant when the run started
    calm_threads()
    inputs = prepare(composed.config, folder.path.parent, folder)
    code, result = _attempt(composed, folder, inputs, json_output)
    with results():
        if json_output:
            print_json(result)
    return code


def one_run(folder: RunFolder) -> RunFolder:
    """`folder` itself. Raises ConfigError if it is a sweep, which has neither a config nor steps; names its cells."""
    if folder.info().get("kind") != "sweep":
        return folder
    from racelab.experiments.runfolder import RunFolder
    from racelab.sweeps.run import members

    paths = [folder.path.parent / str(entry["run_id"]) for entry in members(folder)]
    cells = [reference(RunFolder(path, path.name)) for path in paths if (path / "run.json").is_file()]
    if not cells:
        raise ConfigError(f"{folder.run_id} is a sweep, and no cell of it has been started")
    more = f" and {len(cells) - _SHOWN_CELLS} more" if len(cells) > _SHOWN_CELLS else ""
    named = ", ".join(cells[:_SHOWN_CELLS])
    raise ConfigError(f"{folder.run_id} is a sweep; name one of its cells: {named}{more}")


def command() -> str:
    """How to type the command here: `racelab` if it is on the path, else the script's own path."""
    return "racelab" if shutil.which("racelab") else os.path.relpath(sys.argv[0])


def reference(folder: RunFolder) -> str:
    """What to type for a run: its id where the commands look for runs by themselves, else its path."""
    return folder.run_id if folder.path.parent == run_root("") else shlex.quote(str(folder.path))


def _attempt(
    composed: Composed, folder: RunFolder, inputs: Any, json_output: bool
) -> tuple[int, dict[str, Any]]:
    """One attempt, with the display open; the summary is printed last, or returned under --json."""
    if isinstance(composed.config, EvalRunConfig):
        from racelab.cli.evaluate import attempt

        return attempt(composed, folder, inputs, json_output)
    calm_threads()
    from racelab.experiments.fsio import write_json_atomic
    from racelab.experiments.session import Talk, open_session
    from racelab.experiments.signals import StopRequest

    display = make_display(json_output)
    summary: dict[str, Any] = {}

    def finish(done: RunFolder) -> None:
        from racelab.analysis.summary import summarise

        summary.update(summarise(done))
        write_json_atomic(done.path / "summary.json", summary)

    with StopRequest() as stop:
        display.start(
            f"{folder.info()['name']}  {folder.run_id}{_by_default(composed)}", composed.config.budget
        )
        display.note(f"run folder {folder.path}")
        try:
            talk = Talk(display.update, display.note, finish)
            outcome = open_session(composed.config, folder, inputs, talk, stop).run()
        except KeyboardInterrupt:
            say(
                f"interrupted; go on at the last checkpoint with: {command()} train --resume {reference(folder)}"
            )
            return 130, {"run_id": folder.run_id, "path": str(folder.path), "status": "interrupted"}
        finally:
            display.stop()
    return _say_end(composed, folder, outcome, summary, json_output)


def _by_default(composed: Composed) -> str:
    """`  condition=rlds (the default)` for an RLDS run whose command names none; a run that goes on has none."""
    typed = {word.partition("=")[0] for word in composed.overrides}
    if not isinstance(composed.config, RldsRunConfig) or not typed or "condition" in typed:
        return ""
    return f"  condition={composed.config.method.condition} (the default)"


def _say_end(
    composed: Composed, folder: RunFolder, outcome: Outcome, summary: dict[str, Any], json_output: bool
) -> tuple[int, dict[str, Any]]:
    from racelab.cli.summary import print_summary
    from racelab.experiments.fsio import write_json_atomic
    from racelab.experiments.tracking.shipper import backlog

    waiting = backlog(folder)
    end = {
        "status": outcome.status,
        "step": outcome.step,
        "attempts": len(folder.attempts()),
        "wall_s": outcome.seconds,
        "peak_gib": outcome.peak_gib,
        "records_waiting": waiting,
    }
    if summary:
        summary["end"] = end
        write_json_atomic(folder.path / "summary.json", summary)
    if not json_output:
        if outcome.status == "finished":
            with results():
                print_summary(summary, end, folder, command(), reference(folder))
        else:
            say(
                f"interrupted after step {outcome.step}; go on with: {command()} train --resume {reference(folder)}"
            )
        if waiting and composed.config.tracking.mlflow:
            wait = f"{waiting} {'record waits' if waiting == 1 else 'records wait'}"
            say(f"{wait} for MLflow; deliver with: {command()} sync {reference(folder)}")
    return outcome.exit_code, {**summary, **end, "run_id": folder.run_id, "path": str(folder.path)}

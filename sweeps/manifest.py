"""What ran, with what: the runs under a root, and finding one by what people type."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from racelab.experiments.errors import RunFolderError
from racelab.experiments.runfolder import RunFolder

_DEPTH: Final = 3
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of `racelab runs`; the field names are those of its JSON.

    Attributes:
        started: ISO 8601, UTC.
        steps: planned global updates.
        path: absolute folder of the run.
    """

    run_id: str
    name: str
    kind: str
    method: str
    variant: str
    task: str
    condition: str
    seed: int | None
    status: str
    path: str
    mlflow_run_id: str | None
    started: str
    steps: int
    sweep: str | None = None
    reason: str = ""

    @property
    def evaluates(self) -> bool:
        """An evaluation, or a sweep of such."""
        return "eval" in (self.kind, self.method)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_info(run: RunFolder) -> RunInfo:
    """The facts of one run. Raises RunFolderError if its `run.json` cannot be read."""
    record = run.info()
    return RunInfo(
        run_id=run.run_id,
        name=str(record.get("name", "")),
        kind=str(record.get("kind") or ""),
        method=str(record.get("method") or ""),
        variant=str(record.get("variant") or ""),
        task=str(record.get("task") or ""),
        condition=str(record.get("condition") or ""),
        seed=record.get("seed"),
        status=run.status(),
        path=str(run.path),
        mlflow_run_id=record.get("mlflow_run_id"),
        started=str(record.get("started", "")),
        steps=int(record.get("steps") or 0),
        sweep=record.get("sweep"),
        reason=str(record.get("reason") or ""),
    )


def find_runs(root: str | os.PathLike[str]) -> Iterator[RunFolder]:
    """Every run under `root`, at most three folders down, in no order. A missing root has none.

    Folders of another schema are left out here; opening one by its path says what is wrong with it.
    """
    for path in _walk(Path(root).absolute(), _DEPTH):
        with contextlib.suppress(RunFolderError):
            yield RunFolder.open(path)


def list_runs(root: str | os.PathLike[str]) -> list[RunInfo]:
    """The runs under `root` that can be read, newest first."""
    return survey(root)[0]


def survey(root: str | os.PathLike[str]) -> tuple[list[RunInfo], dict[Path, str]]:
    """The runs under `root`, newest first, and what is wrong with each folder whose run cannot be read."""
    found: list[RunInfo] = []
    damaged: dict[Path, str] = {}
    for path in _walk(Path(root).absolute(), _DEPTH):
        try:
            found.append(run_info(RunFolder.open(path)))
        except RunFolderError as error:
            if (path / "run.json").is_file():  # not just removed while we were looking
                damaged[path] = str(error)
    newest = sorted(found, key=lambda info: (info.started, info.run_id), reverse=True)
    return newest, dict(sorted(damaged.items()))


def resolve(root: str | os.PathLike[str], text: str, *, trained: bool = False) -> RunFolder:
    """The run that `text` means: `latest`, a path, a run id, a unique prefix of one, or a name.

    Args:
        root: folder of the runs.
        text: as typed.
        trained: `latest` is the newest that trains, or a sweep of such: no evaluation.

    Raises:
        RunFolderError: none or several; the message lists the near ones.
    """
    as_path = Path(text)
    if (as_path / "run.json").is_file():
        return RunFolder.open(as_path)
    if text not in ("", ".", "..") and (Path(root) / text / "run.json").is_file():
        return RunFolder.open(Path(root) / text)  # says so if it is of another schema
    if os.sep in text:
        raise RunFolderError(
            f"no run in {as_path.absolute()} (run.json is missing); `racelab runs` lists the runs"
        )
    runs = list_runs(root)
    if not runs:
        raise RunFolderError(f"no runs in {Path(root).absolute()}; start one with `racelab train`")
    if text == "latest":
        return RunFolder.open(_latest(root, runs, trained).path)
    for matches in (
        [info for info in runs if info.run_id == text],
        [info for info in runs if info.name == text],
        [info for info in runs if text and info.run_id.startswith(text)],
    ):
        if len(matches) == 1:
            return RunFolder.open(matches[0].path)
        if matches:
            raise RunFolderError(
                f"{text!r} means {len(matches)} runs: {_several(matches)}; give the whole run id"
            )
    raise RunFolderError(f"no run {text!r} in {Path(root).absolute()}; {_near(text, runs)}")


def _latest(root: str | os.PathLike[str], runs: list[RunInfo], trained: bool) -> RunInfo:
    found = next((info for info in runs if not (trained and info.evaluates)), None)
    if found is None:
        raise RunFolderError(
            f"no run in {Path(root).absolute()} has trained, all are evaluations; start one with `racelab train`"
        )
    return found


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """The folders with a `run.json`."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):  # a folder that is being made
            continue
        if (path / "run.json").is_file():
            yield path
        elif depth > 1:
            yield from _walk(path, depth - 1)


def _several(runs: list[RunInfo]) -> str:
    shown = ", ".join(f"{info.run_id} ({info.name}, {info.status})" for info in runs[:_SHOWN])
    return shown + (f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else "")


def _near(text: str, runs: list[RunInfo]) -> str:
    words = {info.run_id: info for info in runs} | {info.name: info for info in reversed(runs)}
    close = difflib.get_close_matches(text, list(words), n=_SHOWN, cutoff=0.5)
    close += [word for word in words if text and text.lower() in word.lower() and word not in close]
    if close:
        return "near: " + _several(list({words[word].run_id: words[word] for word in close}.values()))
    return "the newest are " + _several(runs[:_SHOWN])

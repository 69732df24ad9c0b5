"""The first process of a run: takes the job, leaves the machine behind as far as it can, and has the run supervised."""

from __future__ import annotations

import os
import select
import sys
from typing import NoReturn

from racelab.experiments.evaluation.sandbox.box import filter as calls
from racelab.experiments.evaluation.sandbox.box import landlock, linux, namespaces
from racelab.experiments.evaluation.sandbox.box.places import DEVICES, to_read
from racelab.experiments.evaluation.sandbox.box.supervise import BOX_FILES, Job, Report, hold, supervise

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main(job: Job) -> NoReturn:
    """Runs a job whose parent holds the other end of standard input."""
    report = Report(job["report"])
    os.umask(0o022)
    watch = os.dup(0)
    for name in list(os.environ):
        del os.environ[name]
    for name in _ONE_THREAD:
        os.putenv(
            name, "1"
        )  # not in os.environ: numpy asks C for it, and a thread per core would pass the limits
    sys.path += [path for path in job["packages"] if path not in sys.path]
    try:
        if job["means"] == "namespaces":
            _in_namespaces(job, report, watch)
        else:
            _alone(job, report, watch)
    except (linux.Unavailable, OSError) as error:
        report.send("refused", error)
    _tidy(watch, job["folder"])
    os._exit(0)


def _tidy(watch: int, folder: str) -> None:
    """Removes the folder if the parent is gone, who else does."""
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    if not poll.poll(0):
        return
    try:
        os.rmdir(folder)
    except OSError:
        os.execv("/bin/sh", ["sh", "-c", 'chmod -R u+rwx -- "$0"; rm -rf -- "$0"', folder])


def _in_namespaces(job: Job, report: Report, watch: int) -> None:
    """The supervisor is process 1 of new namespaces, this process only waits for it."""
    user = linux.spare_user() if os.geteuid() == 0 else None
    namespaces.enter(as_root=user is not None)
    child = os.fork()
    if child:
        os.close(report.place)
        os.waitpid(child, 0)
        return
    linux.die_with_parent()
    linux.hide_memory()
    try:
        owner = os.geteuid() if user is None else user
        namespaces.build(job["folder"], job["python"], owner, BOX_FILES * job["file_mb"] << 20)
        supervise(job, report, watch, lambda: _give_up(user), alone=False, user=user)
    except (linux.Unavailable, OSError) as error:
        report.send("refused", error)
    os._exit(0)


def _give_up(user: int | None) -> None:
    """In the program's process: root's rights, those of the user namespace, and the calls nobody needs."""
    linux.drop_capabilities(user)
    linux.no_new_privileges()
    machine = calls.architecture()
    if machine is None:
        return
    try:
        calls.install(calls.build(machine, alone=False, signals=True, truncates=True, process=os.getpid()))
    except linux.Unavailable:
        return  # a second wall; the namespaces are the first


def _alone(job: Job, report: Report, watch: int) -> None:
    """Filter and Landlock; root also becomes a user that owns nothing."""
    machine, abi = calls.architecture(), landlock.version()
    if machine is None:
        raise linux.Unavailable(f"seccomp: no table of calls for {os.uname().machine}")
    if abi == 0:
        raise linux.Unavailable("Landlock: the kernel has none, or it is switched off")
    user = None
    if os.geteuid() == 0:
        user = linux.spare_user()
        if user is None:
            raise linux.Unavailable("root has no second user id here to run the code as")
        os.chown(job["folder"], user, user)
    linux.adopt_orphans()
    os.chdir(job["folder"])

    def confine() -> None:
        opened = _open_python() if user is not None else {}
        landlock.restrict(abi, to_read(job["python"]), DEVICES, [job["folder"]])
        linux.drop_capabilities(user)
        _reach_through(opened)
        linux.die_with_parent()
        signals = abi >= landlock.SCOPES_SINCE or user is not None
        code = calls.build(machine, alone=True, signals=signals, truncates=abi >= 3, process=os.getpid())
        calls.install(code)

    supervise(job, report, watch, confine, alone=True, user=user)


def _open_python() -> dict[str, int]:
    """Opens the folders that modules are imported from, while root still can."""
    return {path: os.open(path, os.O_PATH) for path in sys.path if os.path.isdir(path)}


def _reach_through(opened: dict[str, int]) -> None:
    """Lets a user who may not walk to the interpreter, below root's home, import through folders that are open."""
    moved = {}
    for path, place in opened.items():
        if os.access(path, os.R_OK | os.X_OK):
            continue
        moved[path] = f"/proc/self/fd/{place}"
        hold(place)
    if not moved:
        return
    sys.path = [moved.get(path, path) for path in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        inside = getattr(module, "__path__", None)
        if isinstance(inside, list):
            module.__path__ = [_moved(path, moved) for path in inside]


def _moved(path: str, moved: dict[str, str]) -> str:
    for old in sorted(moved, key=len, reverse=True):
        if path.startswith(f"{old}/"):
            return moved[old] + path[len(old) :]
    return path

"""The attacks of `attacks.py`, as root and as an ordinary user, by each means, and on machines that lack something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from racelab.experiments import errors
from racelab.experiments.evaluation import sandbox

from . import attacks

ORDINARY = 65534
CASES = sorted(attacks.CASES)
QUICK = ("failures", "deletion", "network", "environment", "signals", "huge_file", "allocation")


@dataclass(frozen=True)
class Account:
    """Runs cases in a process of its own, as root or as nobody."""

    python: str
    folder: Path
    user: int
    before: tuple[str, ...] = ()

    def run(self, means: str, case: str, denied: str = "-") -> None:
        command = [
            *self.before,
            self.python,
            "-s",
            "-E",
            "-c",
            "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import attacks; attacks.main()",
        ]
        ran = subprocess.run(
            [*command, str(self.folder), means, case, denied],
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            cwd="/",
            user=self.user if os.geteuid() == 0 else None,
            group=self.user if os.geteuid() == 0 else None,
            extra_groups=[] if os.geteuid() == 0 else None,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        last = ran.stderr.strip().splitlines()[-1:]
        if last and "SandboxError: sandbox: the code was not run, namespaces cannot be had" in last[0]:
            pytest.skip(f"THIS MACHINE ALLOWS NO NAMESPACES, their tests are not run: {last[0]}")
        assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="session")
def world_readable() -> Iterator[tuple[str, Path]]:
    """An interpreter that any user can run, and a folder with the sandbox and the attacks to import from.

    A checkout or an interpreter below the home of root is copied.
    """
    place = Path(tempfile.mkdtemp(prefix="racelab-sandbox-tests-", dir="/tmp"))
    place.chmod(0o755)
    root = Path(errors.__file__).parent
    package = place / "racelab" / "experiments"
    (package / "evaluation").mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "evaluation/__init__.py"):
        shutil.copy(root / name, package / name)
    shutil.copy(root.resolve().parent / "src" / "racelab" / "__init__.py", place / "racelab")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(sandbox.__file__).parent, package / "evaluation" / "sandbox", ignore=ignore)
    shutil.copy(attacks.__file__, place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        yield _interpreter(place), place
    finally:
        shutil.rmtree(place)


def _interpreter(place: Path) -> str:
    def works(python: str) -> bool:
        user = ORDINARY if os.geteuid() == 0 else None
        try:
            ran = subprocess.run([python, "-c", "import ctypes"], user=user, group=user, cwd="/", check=False)
        except OSError:
            return False
        return ran.returncode == 0

    if works(sys.executable):
        return sys.executable
    home = Path(sys.base_prefix)
    library = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    heavy = (
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "ensurepip",
        "config-*",
        "lib2to3",
    )
    shutil.copytree(home / library, place / "python" / library, ignore=shutil.ignore_patterns(*heavy))
    for path in home.glob("lib/libpython*.so*"):
        shutil.copy(path, place / "python" / "lib")
    (place / "python" / "bin").mkdir()
    python = place / "python" / "bin" / Path(sys.executable).resolve().name
    shutil.copy(Path(sys.executable).resolve(), python)
    assert works(str(python)), f"a copy of {home} does not run as user {ORDINARY}"
    return str(python)


@pytest.fixture(params=["root", "ordinary"])
def account(request: pytest.FixtureRequest, world_readable: tuple[str, Path]) -> Account:
    if request.param == "ordinary":
        return Account(*world_readable, ORDINARY)
    if os.geteuid() != 0:
        pytest.skip("THE TESTS DO NOT RUN AS ROOT, so what root's programs may do is not tested")
    return Account(sys.executable, world_readable[1], 0)


@pytest.mark.parametrize("case", QUICK)
def test_attack_as_found(case: str) -> None:
    """By the means and the user of this machine."""
    attacks.CASES[case](None)


@pytest.mark.slow
@pytest.mark.parametrize("means", ["namespaces", "seccomp"])
@pytest.mark.parametrize("case", CASES)
def test_attack(account: Account, means: str, case: str) -> None:
    account.run(means, case)


@pytest.mark.slow
# more_rights: a second namespace can be had there; it gives no way out of the first
@pytest.mark.parametrize("case", [case for case in CASES if case != "more_rights"])
def test_attack_in_namespaces_without_filter(account: Account, case: str) -> None:
    account.run("namespaces", case, "seccomp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("denied", "case", "means"),
    [
        ("namespaces", "chosen", "seccomp"),
        ("landlock", "chosen", "namespaces"),
        ("seccomp", "chosen", "namespaces"),
        ("namespaces,landlock", "refused", "-"),
        ("namespaces,seccomp", "refused", "-"),
        ("namespaces,seccomp,landlock", "refused", "-"),
    ],
)
def test_machine_that_lacks_something(account: Account, denied: str, case: str, means: str) -> None:
    account.run(means, case, denied)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["chosen", "plain_programs", "number_of_processes", "deletion", "more_rights"]
)
def test_root_that_is_the_only_user_of_its_namespace(world_readable: tuple[str, Path], case: str) -> None:
    """As in some containers of clusters: root by name, with the rights of an ordinary user."""
    ordinary = Account(*world_readable, ORDINARY)
    ordinary.run("namespaces", "huge_file")  # skips where there are none
    account = Account(*world_readable, ORDINARY, ("unshare", "-Ur"))
    account.run("namespaces", case)


def test_no_program_is_no_work() -> None:
    assert sandbox.run_many([]) == []

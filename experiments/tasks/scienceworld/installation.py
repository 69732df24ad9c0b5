"""What ScienceWorld needs of a machine: Java, the simulator's jar and py4j's. Nothing is started or imported here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from racelab.experiments.errors import MissingDependencyError, UnreachableError

INSTALL_PACKAGE: Final = "pip install 'racelab[tasks]'"
INSTALL_JAVA: Final = "apt-get install default-jre-headless"


@dataclass(frozen=True, slots=True)
class Installation:
    """What is on this machine.

    Attributes:
        java: the program.
        jar: the simulator's.
        gateway_jar: py4j's.
        tasks_file: the package's list of tasks (JSON).
        version: of the package.
    """

    java: str
    jar: Path
    gateway_jar: Path
    tasks_file: Path
    version: str


def find_package() -> tuple[Path, str]:
    """Folder and version of the package `scienceworld`, which is not imported.

    Raises:
        MissingDependencyError: it is not installed, or not whole.
    """
    spec = importlib.util.find_spec("scienceworld")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"task=scienceworld needs the package scienceworld: {INSTALL_PACKAGE}")
    folder = Path(spec.submodule_search_locations[0])
    for name in ("scienceworld.jar", "tasks.json"):
        if not (folder / name).is_file():
            raise MissingDependencyError(
                f"{folder} holds no {name}; install the package again: {INSTALL_PACKAGE}"
            )
    return folder, importlib.metadata.version("scienceworld")


def find_installation() -> Installation:
    """Java, the simulator and py4j; nothing is started.

    Raises:
        MissingDependencyError: a package is not installed.
        UnreachableError: there is no Java.
    """
    folder, version = find_package()
    if importlib.util.find_spec("py4j") is None:
        raise MissingDependencyError(f"task=scienceworld needs the package py4j: {INSTALL_PACKAGE}")
    gateway_jar = Path(importlib.import_module("py4j.java_gateway").find_jar_path() or "-")
    if not gateway_jar.is_file():
        raise MissingDependencyError(
            f"py4j is installed without its jar; install it again: {INSTALL_PACKAGE}"
        )
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which(str(Path(home) / "bin" / "java")) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise UnreachableError(
            f"task=scienceworld needs Java, and neither JAVA_HOME nor PATH has one: {INSTALL_JAVA}"
        )
    return Installation(java, folder / "scienceworld.jar", gateway_jar, folder / "tasks.json", version)


def java_version(java: str) -> str:
    """The first line of `java -version`; "" if it does not say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
        return (done.stderr or done.stdout).strip().partition("\n")[0]
    return ""

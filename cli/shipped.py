"""YAML files that ship with racelab and are named without their path: the grids of `sweep`, the graphs of `launch`."""

from __future__ import annotations

from pathlib import Path

from racelab.configs.keys import CONFIG_DIR
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError


def shipped(file: Path, group: str, what: str) -> Path:
    """The file itself, or the one of that name that ships.

    Args:
        file: as typed.
        group: folder of the configs.
        what: word for people.

    Raises:
        ConfigError: neither is there.
    """
    if file.exists() or file.name != str(file) or file.suffix:
        return file
    known = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    if file.name not in known:
        hint = did_you_mean(near(file.name, known))
        raise ConfigError(f"no {what} {file}{hint} (a file, or one that ships: {', '.join(known)})")
    return CONFIG_DIR / group / f"{file}.yaml"

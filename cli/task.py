"""`racelab task`: RLDS against what it is compared with, one run per task, condition and seed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from racelab.cli.ablate import chosen, in_order, refuse_undoing
from racelab.cli.sweep import Options, run_cells, seeded
from racelab.cli.train import parse_seeds
from racelab.configs.compose import compose
from racelab.configs.keys import RLDS
from racelab.configs.schema_rlds import TASKS, RldsRunConfig
from racelab.configs.sources import composed_files, key_sources
from racelab.experiments.errors import ConfigError
from racelab.sweeps.composing import options as config_options
from racelab.sweeps.composing import user_dirs

CONDITIONS: Final = ("rlvr", "base-reflection", "rlds")
"""`--condition all`, in the order of the paper's Table 1: each adds one thing to the one before."""
ARMS: Final = ("rlds-random-grades", "rlds-no-kernel", "rlds-no-aux")
"""`--condition arms`: RLDS without one of its parts."""
_DEFINING: Final = ("method.advantage",)
"""Keys that say what a condition is, wherever they are set: without them it would be another one."""


def task(
    names: Sequence[str],
    conditions: Sequence[str],
    overrides: Sequence[str],
    seeds: str | None,
    jobs: int,
    resume: bool,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Runs the conditions named on the tasks named."""
    given = parse_seeds(seeds)
    known = config_options(config_dirs, RLDS)
    tasks = chosen("task", names, in_order(known.get("task", []), TASKS), overrides, option="name")
    all_conditions = in_order(known.get("condition", []), (*CONDITIONS, *ARMS))
    sets = {"all": CONDITIONS, "arms": ARMS}
    picked = chosen("condition", conditions, all_conditions, overrides, sets=sets)
    for condition in picked:
        choices = {"method": "rlds", "condition": condition}
        refuse_undoing("condition", choices, overrides, config_dirs, also=_DEFINING)
    for name, condition in product(tasks, picked):
        _refuse_another(name, condition, all_conditions, overrides, config_dirs)
    specs = [
        spec
        for name, condition in product(tasks, picked)
        for spec in seeded(
            condition if len(tasks) == 1 else f"{name}-{condition}",
            [*overrides, f"task={name}", f"condition={condition}"],
            given,
        )
    ]
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    asked = [word for name in names for word in ("--name", name)]
    asked += [word for name in conditions for word in ("--condition", name)]
    return run_cells("task", ["task", *asked, *options.words(seeds), *overrides], specs, options)


def _refuse_another(
    name: str, condition: str, known: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[Path]
) -> None:
    """Words that make of a condition exactly another one, which the results would then show under the wrong name.

    Example: `method.sdae.kernel=none` makes of rlds the arm rlds-no-kernel.

    Raises:
        ConfigError: they do.
    """
    words = [word for word in overrides if word.lstrip("+~").startswith("method.")]
    if not words:
        return
    here = _values(name, condition, overrides, config_dirs)
    if here is None or here == _values(name, condition, _without(overrides, words), config_dirs):
        return
    for other in known:
        files = composed_files({"method": "rlds", "condition": other}, user_dirs(config_dirs))
        own = key_sources([(file, group) for file, group in files if group == "condition"])
        undone = [word for word in words if word.lstrip("+~").partition("=")[0] in own]
        if not undone or other == condition:
            continue
        if here == _values(name, other, _without(overrides, undone), config_dirs):
            raise ConfigError(
                f"{shlex.join(undone)}: with that the condition {condition} is {other}; leave it out, or write "
                f"--condition {other}"
            )


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    return [word for word in words if word not in others]


def _values(
    name: str, condition: str, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> object | None:
    """What a condition is made of, but its name; None for what does not compose (that is said later, and better)."""
    try:
        config = compose([*overrides, f"task={name}", f"condition={condition}"], config_dirs).config
    except ConfigError:
        return None
    if not isinstance(config, RldsRunConfig):
        return None
    return config.method.model_dump(mode="json", exclude={"condition"})

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
from racelab.configs.schema_rlds import TASKS, RldsMethodConfig, RldsRunConfig
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
_REFLECT: Final = "method.reflect"
"""The block whose numbers may be set, but not so that nothing is ever retried."""


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
    tasks = chosen("task", _typed(names), in_order(known.get("task", []), TASKS), overrides, option="name")
    all_conditions = in_order(known.get("condition", []), (*CONDITIONS, *ARMS))
    sets = {"all": CONDITIONS, "arms": ARMS}
    picked = chosen("condition", _typed(conditions), all_conditions, overrides, sets=sets)
    for condition in picked:
        choices = {"method": "rlds", "condition": condition}
        refuse_undoing("condition", choices, overrides, config_dirs, also=_DEFINING)
    for name, condition in product(tasks, picked):
        _refuse_no_retries(name, condition, overrides, config_dirs)
        _refuse_another(name, condition, all_conditions, overrides, config_dirs)
    specs = [
        spec
        for name, condition in product(tasks, picked)
        for spec in seeded(
            f"{name}-{condition}",
            [*overrides, f"task={name}", f"condition={condition}"],
            given,
        )
    ]
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    asked = [word for name in names for word in ("--name", name)]
    asked += [word for name in conditions for word in ("--condition", name)]
    return run_cells("task", ["task", *asked, *options.words(seeds), *overrides], specs, options)


def _typed(words: Sequence[str]) -> list[str]:
    """The names in `frozenlake,hotpotqa,`; a comma at an end names nothing."""
    return [name.strip() for word in words for name in word.split(",") if name.strip()]


def _refuse_no_retries(
    name: str, condition: str, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> None:
    """Words that leave a condition with retries without any: its name, and every comparison with it, would be wrong.

    Raises:
        ConfigError: they do.
    """
    words = [word for word in overrides if f"{_key(word)}.".startswith(f"{_REFLECT}.")]
    if not words or _retries(name, condition, overrides, config_dirs) is not False:
        return
    if _retries(name, condition, _without(overrides, words), config_dirs) is False:
        return  # the condition has none of its own
    undoing = [w for w in words if _retries(name, condition, _without(overrides, [w]), config_dirs)] or words
    said = shlex.join(undoing)
    raise ConfigError(
        f"{said}: the condition {condition} retries failures, and would not with that; leave it out, or run it under a "
        f"name of its own: `racelab train task={name} condition={condition} {said}`, or a grid with `racelab sweep`"
    )


def _retries(name: str, condition: str, overrides: Sequence[str], config_dirs: Sequence[Path]) -> bool | None:
    """Whether a failure is ever retried; None for what does not compose."""
    method = _method(name, condition, overrides, config_dirs)
    return None if method is None else bool(method.reflect.max_retries and method.reflect.failure_share)


def _refuse_another(
    name: str, condition: str, known: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[Path]
) -> None:
    """Words that make of a condition exactly another one, which the results would then show under the wrong name.

    Example: `method.sdae.kernel=none` makes of rlds the arm rlds-no-kernel.

    Raises:
        ConfigError: they do.
    """
    words = [word for word in overrides if _key(word).startswith("method.")]
    if not words:
        return
    here = _values(name, condition, overrides, config_dirs)
    if here is None or here == _values(name, condition, _without(overrides, words), config_dirs):
        return
    for other in known:
        files = composed_files({"method": "rlds", "condition": other}, user_dirs(config_dirs))
        own = key_sources([(file, group) for file, group in files if group == "condition"])
        undone = [word for word in words if _key(word) in own]
        if not undone or other == condition:
            continue
        if here == _values(name, other, _without(overrides, undone), config_dirs):
            raise ConfigError(
                f"{shlex.join(undone)}: with that the condition {condition} is {other}; leave it out, or write "
                f"--condition {other}"
            )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    return [word for word in words if word not in others]


def _values(
    name: str, condition: str, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> object | None:
    """What a condition is made of, but its name; None for what does not compose."""
    method = _method(name, condition, overrides, config_dirs)
    return None if method is None else method.model_dump(mode="json", exclude={"condition"})


def _method(
    name: str, condition: str, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> RldsMethodConfig | None:
    """The method's block; None for what does not compose (that is said later, and better)."""
    try:
        config = compose([*overrides, f"task={name}", f"condition={condition}"], config_dirs).config
    except ConfigError:
        return None
    return config.method if isinstance(config, RldsRunConfig) else None

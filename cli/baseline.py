"""`racelab baseline`: the methods that RACE is compared with, one run per method and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from racelab.cli.ablate import chosen, in_order
from racelab.cli.sweep import Options, run_cells, seeded
from racelab.cli.train import parse_seeds
from racelab.configs.keys import RACE
from racelab.sweeps.composing import options as config_options

ORDER = ("evolm", "rlcer", "rubric-arm", "rar", "rrd", "prompted-api", "prompted-policy", "scalar-rm")
"""The order of `all`: those that train their rubrics first; a user's own methods follow."""
_OURS = "race"


def baseline(
    methods: Sequence[str],
    overrides: Sequence[str],
    seeds: str | None,
    jobs: int,
    resume: bool,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Runs the methods named, or all of them."""
    given = parse_seeds(seeds)
    known = [name for name in config_options(config_dirs, RACE).get("method", []) if name != _OURS]
    names = chosen("method", methods, in_order(known, ORDER), overrides)
    specs = [spec for name in names for spec in seeded(name, [*overrides, f"method={name}"], given)]
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    asked = [word for name in methods for word in ("--method", name)]
    return run_cells("baseline", ["baseline", *asked, *options.words(seeds), *overrides], specs, options)

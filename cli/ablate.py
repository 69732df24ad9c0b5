"""`racelab ablate`: RACE against its ablations and sensitivities, one run per variant and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from racelab.cli.sweep import Options, run_cells, seeded
from racelab.cli.train import parse_seeds
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError
from racelab.sweeps.composing import options as config_options

ORDER = (
    "full",
    "no-gradient-filtering",
    "uniform-rubric-sampling",
    "filter-only",
    "random-phase-length",
    "fixed-50-50",
    "static-thresholds",
    "short-phases",
    "low-quarantine",
)
"""The order of RACE Table 6, then Table 16; a user's own variants follow."""


def ablate(
    variants: Sequence[str],
    overrides: Sequence[str],
    seeds: str | None,
    jobs: int,
    resume: bool,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Runs the variants named, or all of them."""
    given = parse_seeds(seeds)
    known = config_options(config_dirs).get("variant", [])
    names = chosen("variant", variants, in_order(known, ORDER), overrides)
    specs = [spec for name in names for spec in seeded(name, [*overrides, f"variant={name}"], given)]
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    asked = [word for name in variants for word in ("--variant", name)]
    return run_cells("ablate", ["ablate", *asked, *options.words(seeds), *overrides], specs, options)


def in_order(known: Sequence[str], order: Sequence[str]) -> list[str]:
    """`known` as in `order`, then the others by name."""
    return [*(name for name in order if name in known), *sorted(set(known) - set(order))]


def chosen(group: str, named: Sequence[str], known: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The options named on the command line, each once; all of `known` for `all`.

    Raises:
        ConfigError: none is named, one is not known, or the overrides choose one as well.
    """
    listed = ", ".join(known)
    if not named:
        raise ConfigError(f"--{group} is missing; name one of {listed}, or all")
    word = next((word for word in overrides if word.partition("=")[0] == group), None)
    if word is not None:
        raise ConfigError(
            f"{word}: the command chooses the {group}; write --{group} {word.partition('=')[2]}"
        )
    for name in named:
        if name != "all" and name not in known:
            raise ConfigError(
                f"no {group} {name!r}{did_you_mean(near(name, [*known, 'all']))} (known: {listed}, all)"
            )
    return list(known) if "all" in named else list(dict.fromkeys(named))

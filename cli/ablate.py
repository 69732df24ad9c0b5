"""`racelab ablate`: RACE against its ablations and sensitivities, one run per variant and seed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

from racelab.cli.sweep import Options, run_cells, seeded
from racelab.cli.train import parse_seeds
from racelab.configs.keys import RACE
from racelab.configs.schema import Config
from racelab.configs.schema_methods import RaceConfig
from racelab.configs.schema_rlds import AnyConfig
from racelab.configs.sources import composed_files, key_sources
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError
from racelab.sweeps.composing import options as config_options
from racelab.sweeps.composing import user_dirs

ORDER: Final[tuple[str, ...]] = get_args(RaceConfig.model_fields["variant"].annotation)
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
    known = config_options(config_dirs, RACE).get("variant", [])
    names = chosen("variant", variants, in_order(known, ORDER), overrides)
    for name in names:
        refuse_undoing("variant", {"variant": name}, overrides, config_dirs)
    specs = [spec for name in names for spec in seeded(name, [*overrides, f"variant={name}"], given)]
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    asked = [word for name in variants for word in ("--variant", name)]
    command = ["ablate", *asked, *options.words(seeds), *overrides]
    return run_cells("ablate", command, specs, options, label=with_numbers)


def refuse_undoing(
    group: str,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    also: Sequence[str] = (),
) -> None:
    """A word that sets what the option of a group sets would run something else under the option's name.

    Args:
        group: variant or condition.
        choices: group -> option, `group` among them.
        overrides: of the command line.
        config_dirs: the user's.
        also: further keys that make the option what it is, whichever of the files sets them.

    Raises:
        ConfigError: there is one.
    """
    option = choices[group]
    files = composed_files(choices, user_dirs(config_dirs))
    everything = key_sources(files) if also else {}
    own = {key: everything[key] for key in also if key in everything}
    own |= key_sources([(file, name) for file, name in files if name == group])
    for word in overrides:
        key, _, value = word.partition("=")
        key = key.lstrip("+~")
        if key in own and own[key][-1].text == value:
            continue  # says what the option says
        # a block, as method.trqc={eta_sigma: 0.05}, sets what stands in it
        if key in own or any(name.startswith(f"{key}.") for name in own if key != "method"):
            raise ConfigError(
                f"{word}: the {group} {option} sets {key} itself; leave the word out, or run it under a name of its "
                f"own: `racelab train {group}={option} {shlex.quote(word)}`, or a grid with `racelab sweep`"
            )


def with_numbers(label: str, config: AnyConfig) -> str:
    """The label with the numbers of the variant, where its name does not say them: they follow the preset.

    Example: `fixed-50-50` with phases of 3 and 3 steps gives `fixed-50-50-3+3`.
    """
    method = config.method if isinstance(config, Config) else None
    write = _NUMBERS.get(label)
    return f"{label}-{write(method)}" if write is not None and isinstance(method, RaceConfig) else label


def _targets(method: RaceConfig) -> str:
    return f"q{method.trqc.q_target:g}-{_means(method)}"


def _means(method: RaceConfig) -> str:
    return f"L{method.phase.policy_target}-M{method.phase.rubric_target}"


_NUMBERS: Final[Mapping[str, Callable[[RaceConfig], str]]] = {
    "fixed-50-50": lambda method: "+".join(map(str, method.phase.fixed)),
    "random-phase-length": _means,
    "short-phases": _targets,
    "low-quarantine": _targets,
}
"""Variant -> the numbers used: policy and rubric steps of a phase, or their targets L* and M* and q*."""


def in_order(known: Sequence[str], order: Sequence[str]) -> list[str]:
    """`known` as in `order`, then the others by name."""
    return [*(name for name in order if name in known), *sorted(set(known) - set(order))]


def chosen(
    group: str,
    named: Sequence[str],
    known: Sequence[str],
    overrides: Sequence[str],
    *,
    option: str = "",
    sets: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """The options named on the command line, singly or with commas, each once.

    Args:
        group: that they are options of.
        named: words of the command line.
        known: every option, in order.
        overrides: of the command line.
        option: name of the command line's option; "": that of the group.
        sets: word -> the options that it stands for; None: `all` for every one.

    Raises:
        ConfigError: none is named, one is not known, or the overrides choose one as well.
    """
    option, sets = option or group, sets if sets is not None else {"all": known}
    listed = ", ".join(known)
    if not named:
        raise ConfigError(f"--{option} is missing; name one of {listed}, or {' or '.join(sets)}")
    word = next((word for word in overrides if word.partition("=")[0] == group), None)
    if word is not None:
        raise ConfigError(
            f"{word}: the command chooses the {group}; write --{option} {word.partition('=')[2]}"
        )
    named = [name.strip() for word in named for name in word.split(",")]
    for name in named:
        if name not in sets and name not in known:
            raise ConfigError(
                f"no {group} {name!r}{did_you_mean(near(name, [*known, *sets]))} (known: {listed}, {', '.join(sets)})"
            )
    picked = dict.fromkeys(one for name in named for one in sets.get(name, [name]))
    return list(known) if set(picked) == set(known) else list(picked)

"""The keys that the schema knows, and the groups and options that lie on disk. No Hydra, no YAML reading.

There are three families of runs: RACE, RLDS and evaluations. Each has a schema, a `run.yaml` at the top of its
compositions, and groups of its own; others, such as backend, launcher and tracking, are shared.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

from racelab.configs.schema import Config
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import RldsRunConfig

CONFIG_DIR = Path(__file__).resolve().parent
"""Where racelab's own YAML files lie (a real path, also from a wheel)."""

RLDS_DIR = CONFIG_DIR / "rlds"
"""The RLDS family's own groups."""

EVAL_DIR = CONFIG_DIR / "evaluation"
"""Those of evaluations."""

PRIMARY = "run"
"""The top of every composition: `run.yaml` in the family's folder."""

_NO_GROUPS = frozenset({"paper", "sane", "embedded", "sweep", "graph", "rlds", "evaluation"})
"""Folders of YAML files that nobody chooses by `group=option`."""


@dataclass(frozen=True, slots=True)
class Family:
    """One of the kinds of runs.

    Attributes:
        name: race, rlds or eval.
        title: for people.
        schema: of the composed config.
        folder: of `run.yaml`; first on the search path.
        by: the group whose choice, with the preset's, brings a further file: embedded/race.yaml, paper/frozenlake.yaml.
        by_presets: the presets that have such files.
        shared: groups whose options are looked for in racelab's common folder too; () for all.
        marks: groups that RACE runs do not have: naming one makes a run of this family.
        mark: a word that does so, for messages.
    """

    name: str
    title: str
    schema: type[Config] | type[RldsRunConfig] | type[EvalRunConfig]
    folder: Path
    by: str
    by_presets: tuple[str, ...]
    shared: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    mark: str = ""

    def roots(self, config_dirs: Sequence[Path] = ()) -> tuple[Path, ...]:
        """Folders in which an option is looked for, in this order."""
        own = (self.folder,) if self.folder == CONFIG_DIR else (self.folder, CONFIG_DIR)
        return (*own, *config_dirs)


RACE = Family("race", "RACE", Config, CONFIG_DIR, "method", ("paper", "sane", "embedded"))
RLDS = Family(
    "rlds",
    "RLDS",
    RldsRunConfig,
    RLDS_DIR,
    "task",
    ("paper", "sane", "embedded"),
    shared=("model", "learner", "eval", "backend", "launcher", "tracking", "checkpoint"),
    marks=("task", "condition"),
    mark="task=frozenlake",
)
EVAL = Family(
    "eval",
    "evaluation",
    EvalRunConfig,
    EVAL_DIR,
    "suite",
    (),
    shared=("judge", "encoder", "backend", "launcher", "tracking"),
    marks=("suite",),
    mark="suite=race",
)
FAMILIES = (RACE, RLDS, EVAL)


def family_of(chosen: Iterable[tuple[str, str | None]]) -> Family:
    """The family that these (key, value) pairs choose: by a group of its own, RLDS also by method=rlds; else RACE."""
    for key, value in chosen:
        for family in FAMILIES:
            if key.partition(".")[0] in family.marks and value is not None:
                return family
        if key == "method" and value is not None and (RLDS_DIR / "method" / f"{value}.yaml").is_file():
            return RLDS
    return RACE


def _models(annotation: object) -> tuple[type[BaseModel], ...]:
    """The config blocks inside a type annotation: one, several for a union, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(model for arg in get_args(annotation) for model in _models(arg))
    return ()


def _walk(model: type[BaseModel], prefix: str, leaves: dict[str, None], sections: dict[str, None]) -> None:
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        blocks = _models(info.annotation)
        if not blocks:
            leaves[key] = None
            continue
        sections[key] = None
        for block in blocks:
            _walk(block, f"{key}.", leaves, sections)


@cache
def _keys(schema: type[BaseModel]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    leaves: dict[str, None] = {}
    sections: dict[str, None] = {}
    _walk(schema, "", leaves, sections)
    return tuple(leaves), tuple(sections)


def _of(family: Family | None, which: int) -> tuple[str, ...]:
    families = FAMILIES if family is None else (family,)
    return tuple(dict.fromkeys(key for one in families for key in _keys(one.schema)[which]))


def leaf_keys(family: Family | None = None) -> tuple[str, ...]:
    """Every key that holds a value, dotted, in the order of the schema (all options together); None: of all."""
    return _of(family, 0)


def section_keys(family: Family | None = None) -> tuple[str, ...]:
    """Every key that holds other keys, dotted."""
    return _of(family, 1)


@cache
def identity_keys() -> dict[str, str]:
    """Keys that say which option a block holds (`data.source`), with the group that sets them.

    Set alone they would leave the block with the keys of another option, so only the group may set them.
    """
    keys = {f"{name}.name": name for name in ("method", "backend")}
    keys |= {"method.condition": "condition", "eval.suite": "suite"}
    for family in FAMILIES:
        for name, info in family.schema.model_fields.items():
            if isinstance(info.discriminator, str):
                keys[f"{name}.{info.discriminator}"] = name
    return keys


@cache
def union_sections(family: Family) -> frozenset[str]:
    """Sections with several possible blocks; pydantic names the chosen one in the place of an error."""
    return frozenset(
        name for name, info in family.schema.model_fields.items() if info.discriminator is not None
    )


def groups(config_dirs: Sequence[Path] = (), family: Family | None = RACE) -> dict[str, list[str]]:
    """Group -> sorted options: the sub-folders with YAML files, racelab's own and those of `config_dirs`.

    Args:
        config_dirs: the user's.
        family: whose groups; None: of all.
    """
    found: dict[str, set[str]] = {}
    for one in FAMILIES if family is None else (family,):
        for root in one.roots(config_dirs):
            for folder in sorted(p for p in root.iterdir() if p.is_dir() and p.name not in _NO_GROUPS):
                if not _belongs(folder.name, root, one):
                    continue
                options = {path.stem for path in folder.glob("*.yaml")}
                if options:
                    found.setdefault(folder.name, set()).update(options)
    return {group: sorted(options) for group, options in sorted(found.items())}


def _belongs(group: str, root: Path, family: Family) -> bool:
    """Whether a family takes the options of this group in this folder."""
    if family.name == RACE.name:
        return not any(group in other.marks for other in FAMILIES)
    if root == CONFIG_DIR:
        return group in family.shared
    return group in family.shared or (family.folder / group).is_dir()


def shadowed(config_dirs: Iterable[Path]) -> list[tuple[Path, Path]]:
    """(user's file, racelab's file) wherever a user's file has the name of one that ships.

    Hydra would silently take racelab's; that must be an error instead.
    """
    clashes = []
    for root in config_dirs:
        for path in sorted([*root.glob("*.yaml"), *root.glob("*/*.yaml")]):
            for home in (CONFIG_DIR, RLDS_DIR, EVAL_DIR):
                own = home / path.relative_to(root)
                if own.is_file() and own.resolve() != path.resolve():
                    clashes.append((path, own))
                    break
    return clashes

"""The keys that the schema knows, and the groups and options that lie on disk. No Hydra, no YAML reading."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

from racelab.configs.schema import Config

CONFIG_DIR = Path(__file__).resolve().parent
"""Where racelab's own YAML files lie (a real path, also from a wheel)."""

PRIMARY = "run"
"""The top of every composition: `run.yaml`."""

BY_METHOD = ("paper", "sane", "embedded")
"""Groups named after a preset: what it sets for each method. The choice of preset and method chooses them."""

_NO_GROUPS = frozenset({*BY_METHOD, "sweep"})
"""Folders of YAML files that nobody chooses by `group=option`."""


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
def _schema() -> tuple[tuple[str, ...], tuple[str, ...]]:
    leaves: dict[str, None] = {}
    sections: dict[str, None] = {}
    _walk(Config, "", leaves, sections)
    return tuple(leaves), tuple(sections)


def leaf_keys() -> tuple[str, ...]:
    """Every key that holds a value, dotted, in the order of the schema (all data sources together)."""
    return _schema()[0]


def section_keys() -> tuple[str, ...]:
    """Every key that holds other keys, dotted."""
    return _schema()[1]


@cache
def identity_keys() -> dict[str, str]:
    """Keys that say which option a block holds (`data.source`), with the group that sets them.

    Set alone they would leave the block with the keys of another option, so only the group may set them.
    """
    keys = {f"{name}.name": name for name in ("method", "backend", "launcher")}
    for name, info in Config.model_fields.items():
        if isinstance(info.discriminator, str):
            keys[f"{name}.{info.discriminator}"] = name
    return keys


def union_sections() -> frozenset[str]:
    """Sections with several possible blocks; pydantic names the chosen one in the place of an error."""
    return frozenset(name for name, info in Config.model_fields.items() if info.discriminator is not None)


def groups(config_dirs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Group -> sorted options: the sub-folders with YAML files, racelab's own and those of `config_dirs`."""
    found: dict[str, set[str]] = {}
    for root in (CONFIG_DIR, *config_dirs):
        for folder in sorted(p for p in root.iterdir() if p.is_dir() and p.name not in _NO_GROUPS):
            options = {path.stem for path in folder.glob("*.yaml")}
            if options:
                found.setdefault(folder.name, set()).update(options)
    return {group: sorted(options) for group, options in sorted(found.items())}


def shadowed(config_dirs: Iterable[Path]) -> list[tuple[Path, Path]]:
    """(user's file, racelab's file) wherever a user's file has the name of one that ships.

    Hydra would silently take racelab's; that must be an error instead.
    """
    clashes = []
    for root in config_dirs:
        for path in sorted([*root.glob("*.yaml"), *root.glob("*/*.yaml")]):
            own = CONFIG_DIR / path.relative_to(root)
            if own.is_file() and own.resolve() != path.resolve():
                clashes.append((path, own))
    return clashes

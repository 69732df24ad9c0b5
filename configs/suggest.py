"""What somebody probably meant: near names for keys, groups, options and commands. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_CUTOFF = 0.6
_AT_MOST = 3


def near(word: str, known: Iterable[str], at_most: int = _AT_MOST) -> list[str]:
    """The known names that look most like `word`, best first; [] where none is near."""
    by_folded: dict[str, str] = {}
    for name in known:
        by_folded.setdefault(name.lower(), name)
    hits = difflib.get_close_matches(word.lower(), list(by_folded), n=at_most, cutoff=_CUTOFF)
    return [by_folded[hit] for hit in hits]


def near_keys(key: str, known: Sequence[str], at_most: int = _AT_MOST) -> list[str]:
    """Dotted keys that `key` may stand for, best first.

    A bare or partial key is looked up by its tail (`q_target` -> `method.trqc.q_target`); then whole keys
    that look alike; then keys whose last part looks alike.

    Example:
        >>> near_keys("trqc.q_target", ["method.trqc.q_target", "run.seed"])
        ['method.trqc.q_target']
    """
    tails = [name for name in known if name == key or name.endswith(f".{key}")]
    if tails:
        return tails[:at_most]
    last = key.rpartition(".")[2]
    same_last = [name for name in known if name.rpartition(".")[2] == last]
    same_last.sort(key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
    alike = near(key, known, at_most)
    last_names = near(last, {name.rpartition(".")[2]: None for name in known}, at_most)
    by_last = [name for tail in last_names for name in known if name.rpartition(".")[2] == tail]
    ordered = dict.fromkeys([*same_last[:at_most], *alike, *by_last])
    return list(ordered)[:at_most]


def did_you_mean(names: Sequence[str]) -> str:
    """`; did you mean a, b or c?`, or nothing where there is no name."""
    if not names:
        return ""
    if len(names) == 1:
        return f"; did you mean {names[0]}?"
    return f"; did you mean {', '.join(names[:-1])} or {names[-1]}?"

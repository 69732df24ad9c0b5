"""What somebody probably meant: near names for keys, groups, options and commands. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

_CUTOFF = 0.6
_AT_MOST = 3
_BEHIND = 0.2
"""A name whose likeness is this far behind the best one's is no longer worth a mention."""


def near(word: str, known: Iterable[str], at_most: int = _AT_MOST) -> list[str]:
    """The known names that look most like `word`, best first; [] where none is near."""
    by_folded: dict[str, str] = {}
    for name in known:
        by_folded.setdefault(name.lower(), name)
    word = word.lower()
    hits = difflib.get_close_matches(word, list(by_folded), n=at_most, cutoff=_CUTOFF)
    like = [difflib.SequenceMatcher(None, hit, word).ratio() for hit in hits]
    return [by_folded[hit] for hit, ratio in zip(hits, like, strict=True) if ratio > like[0] - _BEHIND]


def near_keys(
    key: str, known: Sequence[str], at_most: int = _AT_MOST, prefer: Collection[str] = ()
) -> list[str]:
    """Dotted keys that `key` may stand for, best first.

    A bare or partial key is looked up by its tail (`q_target` -> `method.trqc.q_target`, see `by_tail`; `prefer` names
    the keys of the method in force); then whole keys that look alike; then keys whose last part looks alike.

    Example:
        >>> near_keys("trqc.q_target", ["method.trqc.q_target", "run.seed"])
        ['method.trqc.q_target']
    """
    tails = by_tail(key, known, prefer)
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


def by_tail(key: str, known: Iterable[str], prefer: Collection[str] = ()) -> list[str]:
    """The dotted keys that are `key` or end with it, in their order.

    Of each top section only those that lie least deep (the others are copies for a special case), and none but the
    `prefer`red ones if any is.
    """
    tails = [name for name in known if name == key or name.endswith(f".{key}")]
    tails = [name for name in tails if name in prefer] or tails
    least: dict[str, int] = {}
    for name in tails:
        top, depth = name.partition(".")[0], name.count(".")
        least[top] = min(least.get(top, depth), depth)
    return [name for name in tails if name.count(".") == least[name.partition(".")[0]]]


def did_you_mean(names: Sequence[str]) -> str:
    """`; did you mean a, b or c?`, or nothing where there is no name."""
    if not names:
        return ""
    if len(names) == 1:
        return f"; did you mean {names[0]}?"
    return f"; did you mean {', '.join(names[:-1])} or {names[-1]}?"

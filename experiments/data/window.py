"""Prompts against the model's window, before a run starts (RACE truncates them to 2,048 tokens, App. B.2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.types import Prompt

Policy = Literal["error", "truncate", "drop"]


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Counts and lengths in tokens, as the given counter counts.

    Attributes:
        limit: tokens that a prompt may have.
        longest: length of the longest prompt before anything was done.
        longest_id: its id.
    """

    limit: int
    longest: int
    longest_id: str
    truncated: int = 0
    dropped: int = 0

    def line(self) -> str:
        """One line for the log."""
        return (
            f"longest prompt {self.longest} of {self.limit} tokens ({self.longest_id}); "
            f"{self.truncated} truncated, {self.dropped} dropped"
        )


def fit_window(
    prompts: Sequence[Prompt], count_tokens: Callable[[str], int], limit: int, policy: Policy
) -> tuple[list[Prompt], WindowReport]:
    """Makes sure that every prompt has at most `limit` tokens.

    Args:
        prompts: not empty.
        count_tokens: length of a prompt as the model will see it, chat template included; it must not shrink
            when text is added.
        limit: tokens, e.g. the smaller of data.max_prompt_tokens and the model's window less the response.
        policy: `error` refuses, `truncate` cuts at the end, between words where possible, `drop` leaves out.

    Raises:
        ConfigError: an unknown policy, or `limit` does not even hold an empty prompt.
        DataError: policy `error` and a prompt is too long (source, id and length named); no prompt is left.
    """
    if policy not in ("error", "truncate", "drop"):
        raise ConfigError(f"data.on_long_prompt={policy}: use error, truncate or drop")
    if not prompts:
        raise DataError("no prompts to measure; check data.source and its filters")
    overhead = count_tokens("")
    if overhead >= limit:
        raise ConfigError(
            f"data.max_prompt_tokens={limit}: the chat template alone takes {overhead} tokens; raise it"
        )
    lengths = [count_tokens(p.text) for p in prompts]
    top = max(range(len(prompts)), key=lengths.__getitem__)
    report = WindowReport(limit, lengths[top], prompts[top].prompt_id)
    if report.longest <= limit:
        return list(prompts), report
    if policy == "error":
        where = f"{prompts[top].source}: " if prompts[top].source else ""
        raise DataError(
            f"{where}prompt {report.longest_id} has {report.longest} tokens, {limit} fit; shorten it, "
            "or set data.on_long_prompt=truncate or drop"
        )
    over = sum(length > limit for length in lengths)
    if policy == "drop":
        kept = [p for p, length in zip(prompts, lengths, strict=True) if length <= limit]
        if not kept:
            raise DataError(f"all {over} prompts have more than {limit} tokens; raise data.max_prompt_tokens")
        return kept, replace(report, dropped=over)
    cut = [
        p if length <= limit else replace(p, text=truncate_text(p.text, count_tokens, limit))
        for p, length in zip(prompts, lengths, strict=True)
    ]
    blank = next((p.prompt_id for p in cut if not p.text.strip()), None)
    if blank is not None:
        raise DataError(
            f"prompt {blank}: nothing is left within {limit} tokens; raise data.max_prompt_tokens"
        )
    return cut, replace(report, truncated=over)


def truncate_text(text: str, count_tokens: Callable[[str], int], limit: int) -> str:
    """The longest beginning of `text` with at most `limit` tokens, cut between words where one word fits."""
    ends = list(accumulate(len(piece) for piece in re.findall(r"\s*\S+", text)))
    best = _last_fitting(text, ends, count_tokens, limit)
    if best == 0:  # not even the first word
        best = _last_fitting(text, list(range(1, len(text) + 1)), count_tokens, limit)
    return text[:best]


def _last_fitting(text: str, ends: Sequence[int], count_tokens: Callable[[str], int], limit: int) -> int:
    """The greatest end whose beginning fits, 0 if none does; bisection."""
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if count_tokens(text[: ends[middle]]) <= limit:
            low = middle + 1
        else:
            high = middle
    return ends[low - 1] if low else 0

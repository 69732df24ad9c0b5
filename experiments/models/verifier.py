"""Verifiers: which items of a rubric an answer satisfies (RLCER). Two kinds, over the same frozen judge.

`list`: the judge model writes one reply per check, a JSON list with exactly K booleans. `items`: for judges that can
only score, one score per item under a rubric of that item alone; an item holds from a threshold on.

Where there is no readable reply or no score, no item holds (Sheng et al.'s code does the same), and the failure is
counted: RLCER then finds an item that is the same for all answers, which is not valid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.items import ItemQuestion, judge_items
from racelab.experiments.models.judge_prompted import JsonSettings
from racelab.experiments.models.prompts.rlcer import VERIFY_LIST
from racelab.experiments.models.rubric import json_values
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import Judge, LanguageModel, Verifier
from racelab.experiments.types import Check, GenerationRequest, Verdicts

if TYPE_CHECKING:
    import torch

_NO_THOUGHT = "<think>\n\n</think>\n\n"  # as the JSON judge's


class JsonVerifier:
    """One generated reply per check, with a boolean for each item; implements `ports.Verifier`."""

    def __init__(self, model: LanguageModel, *, settings: JsonSettings | None = None) -> None:
        """Keeps the parts; of the settings `high` is not read."""
        self._model = model
        self.settings = settings or JsonSettings()

    def verify(self, checks: Sequence[Check]) -> Verdicts:
        """One call per check.

        A reply that cannot be read is a parse failure; a prompt beyond the window, or a model that cannot be reached,
        an infrastructure failure.
        """
        replies = self._replies([self._prefix(c) for c in checks])
        found = [
            None if text is None else parse_holds(text, len(c.items))
            for text, c in zip(replies, checks, strict=True)
        ]
        lost = replies.count(None)
        return Verdicts(
            tuple(
                np.zeros(len(c.items), dtype=np.bool_) if f is None else f
                for f, c in zip(found, checks, strict=True)
            ),
            calls=len(checks),
            parse_failures=sum(f is None for f in found) - lost,
            infra_failures=lost,
        )

    def _prefix(self, check: Check) -> tuple[int, ...]:
        items = "\n".join(f"{k}. {text}" for k, text in enumerate(check.items, 1))
        prefix = VERIFY_LIST.encode(
            self._model,
            prompt=defang(check.prompt.text),
            items=defang(items),
            response=defang(strip_thinking(check.answer.text)),
            n=str(len(check.items)),
        )
        if self.settings.thinking or len(self._model.encode("<think>")) != 1:
            return prefix
        return (*prefix, *self._model.encode(_NO_THOUGHT))

    def _replies(self, prefixes: Sequence[tuple[int, ...]]) -> list[str | None]:
        """The reply to each prompt, all decoded in one batch; None where there is none."""
        how = self.settings
        fits = [i for i, p in enumerate(prefixes) if len(p) + how.max_tokens <= self._model.window]
        replies: list[str | None] = [None] * len(prefixes)
        if not fits:
            return replies
        asked = [prefixes[i] for i in fits]
        requests = [GenerationRequest(p, 1, how.max_tokens, how.temperature, how.top_p) for p in asked]
        try:
            samples = self._model.generate(requests, self._rng(asked))
        except UnreachableError:
            return replies
        for i, group in zip(fits, samples, strict=True):
            replies[i] = group[0].text
        return replies

    def _rng(self, prefixes: Sequence[tuple[int, ...]]) -> torch.Generator:
        """Seeded by the setting and what is asked: checking the same again gives the same."""
        import torch

        body = json.dumps(["verify", self.settings.seed, prefixes]).encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(body).digest()[:7], "big"))


class ItemVerifier:
    """One judge score per item and answer; implements `ports.Verifier`."""

    def __init__(self, judge: Judge, *, threshold: float) -> None:
        """Keeps the parts; a score of exactly `threshold` holds."""
        self._judge, self._threshold = judge, threshold

    def verify(self, checks: Sequence[Check]) -> Verdicts:
        """One call per item. Checks of the same items that follow each other are asked together."""
        runs = [list(run) for _, run in groupby(checks, key=lambda c: (c.prompt.prompt_id, c.items))]
        questions = [ItemQuestion(r[0].prompt, r[0].items, tuple(c.answer for c in r)) for r in runs]
        answers = judge_items(self._judge, questions, self._threshold)
        scored = answers.scored
        return Verdicts(
            tuple(row == 1.0 for holds_GK in answers.holds for row in holds_GK),
            calls=scored.calls,
            parse_failures=scored.parse_failures,
            infra_failures=scored.infra_failures,
        )


def make_verifier(
    kind: str,
    *,
    model: LanguageModel,
    judge: Judge,
    threshold: float,
    settings: JsonSettings | None = None,
) -> Verifier:
    """A verifier of that kind.

    Args:
        kind: `list` or `items` (`method.verifier`).
        model: the judge's language model; `list` asks it.
        judge: the calibrated judge; `items` asks it.
        threshold: `items`: an item holds from this score on.
        settings: `list`: how the judge model replies.

    Raises:
        ConfigError: unknown kind, or `list` over a judge that writes no JSON.
    """
    if kind == "items":
        return ItemVerifier(judge, threshold=threshold)
    if kind != "list":
        raise ConfigError(f"method.verifier {kind!r} is unknown; take list or items")
    if settings is None:
        raise ConfigError(
            "method.verifier=list asks the judge model for a JSON reply; set judge=json, or method.verifier=items"
        )
    return JsonVerifier(model, settings=settings)


def parse_holds(reply: str, n: int) -> npt.NDArray[np.bool_] | None:
    """The last `holds` in a reply's JSON; None unless it is a list of exactly `n` booleans.

    Thinking is stripped first, so that a list tried out while thinking is not taken for the verdict.
    """
    found: object = None
    for value in json_values(strip_thinking(reply)):
        if isinstance(value, dict) and "holds" in value:
            found = value["holds"]
    if not isinstance(found, list) or len(found) != n or not all(isinstance(b, bool) for b in found):
        return None
    return np.array(found, dtype=np.bool_)

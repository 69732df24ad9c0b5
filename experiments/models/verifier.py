"""Verifiers: which items of a rubric an answer satisfies (RLCER). Two kinds, over the same frozen judge.

`list`: the judge model writes one reply per check, a JSON list with exactly K booleans. `items`: for judges that can
only score, one score per item under a rubric of that item alone; an item holds from a threshold on.

Where there is no readable reply or no score, no item holds (Sheng et al.'s code does the same), and the failure is
counted: RLCER then finds an item that is the same for all answers, which is not valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from racelab.experiments.errors import ConfigError
from racelab.experiments.models.items import ItemQuestion, judge_items
from racelab.experiments.models.judge_prompted import JsonSettings, closed_thought, json_replies
from racelab.experiments.models.prompts.rlcer import VERIFY_LIST
from racelab.experiments.models.rubric import json_values
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import Judge, LanguageModel, Verifier
from racelab.experiments.types import Check, Verdicts


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
        replies = json_replies(self._model, [self._prefix(c) for c in checks], self.settings, "verify")
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
        return (*prefix, *closed_thought(self._model, self.settings.thinking))


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
    model: LanguageModel | None,
    judge: Judge,
    threshold: float,
    settings: JsonSettings | None = None,
) -> Verifier:
    """A verifier of that kind.

    Args:
        kind: `list` or `items` (`method.verifier`).
        model: the judge's language model; `list` asks it. None for a judge behind a server.
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
    if settings is None or model is None:
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

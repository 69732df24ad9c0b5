"""Which rubrics say the same thing twice (RACE §4, Table 1).

Such a rubric has a pair of criteria of which satisfying one substantially implies satisfying the other. One that
repeats a criterion word for word is redundant without asking.

Deviations from the paper, which asked Gemini 3.5 Flash in a wording that is not published:
  * the question is ours, one per rubric, and the model is whichever the config names;
  * `encoder` asks nobody: two criteria say the same if the cosine of their embeddings reaches a bound. It is an
    approximation, blind to implication between criteria of different wording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from racelab.experiments.errors import ConfigError
from racelab.experiments.models.chat import ChatModel, ChatRequest
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.proposals import item_key, read_yes
from racelab.experiments.ports import Encoder
from racelab.experiments.types import Prompt

Kind = Literal["none", "encoder", "judge", "api"]
Written = tuple[Prompt, tuple[str, ...]]
"""A prompt and the criteria of its rubric."""

REDUNDANCY = RoleTemplate(
    name="redundancy",
    version=1,
    system="You compare the criteria of a grading rubric. You end your reply with YES or NO.",
    user="""Request:
{prompt}

Criteria by which answers to the request are graded:
{criteria}

Is there a pair of criteria of which one makes the other needless: whatever answer satisfies the one would nearly \
always satisfy the other? Reply YES or NO.""",
)

_MAX_TOKENS = 1024
"""Of a reply; room for a model that thinks first."""


class Redundancy(Protocol):
    """Says of each rubric whether two of its criteria say the same."""

    def redundant(self, rubrics: Sequence[Written]) -> list[bool | None]:
        """One answer per rubric, None where there is none. Fewer than two criteria are never redundant."""


def repeats(criteria: Sequence[str]) -> bool:
    """Whether one of them stands there twice, case, spaces and full stops aside."""
    return len({item_key(c) for c in criteria}) < len(criteria)


class EncoderRedundancy:
    """Two criteria whose embeddings are close say the same; implements `Redundancy`."""

    def __init__(self, encoder: Encoder, cosine: float) -> None:
        """Keeps the parts; `cosine` is the bound, inclusive."""
        self._encoder, self._cosine = encoder, cosine

    def redundant(self, rubrics: Sequence[Written]) -> list[bool | None]:
        """The criteria of all rubrics without exact repeats embedded in one call."""
        found: list[bool | None] = [repeats(criteria) for _, criteria in rubrics]
        asked = [i for i, twice in enumerate(found) if not twice]
        rows = self._encoder.embed([c for i in asked for c in rubrics[i][1]])
        at = 0
        for i in asked:
            n = len(rubrics[i][1])
            own = rows[at : at + n]
            at += n
            found[i] = bool(((own @ own.T)[np.triu_indices(n, 1)] >= self._cosine).any())
        return found


class ChatRedundancy:
    """A chat model is shown the rubric and says YES or NO; implements `Redundancy`."""

    def __init__(self, model: ChatModel) -> None:
        """Keeps the model."""
        self._model = model

    def redundant(self, rubrics: Sequence[Written]) -> list[bool | None]:
        """One greedy request per rubric of two different criteria or more; a failed or unreadable reply gives None."""
        found: list[bool | None] = [repeats(criteria) for _, criteria in rubrics]
        asked = [i for i, (_, criteria) in enumerate(rubrics) if len(criteria) > 1 and not found[i]]
        if not asked:
            return found
        replies = self._model.complete([self._request(*rubrics[i]) for i in asked])
        for i, reply in zip(asked, replies, strict=True):
            found[i] = None if reply.text is None else read_yes(reply.text, last=True)
        return found

    def _request(self, prompt: Prompt, criteria: tuple[str, ...]) -> ChatRequest:
        listed = "\n".join(f"{i}. {text}" for i, text in enumerate(criteria, 1))
        user = REDUNDANCY.render(prompt=prompt.text, criteria=listed)
        return ChatRequest(REDUNDANCY.system, user, _MAX_TOKENS)


def make_redundancy(
    kind: Kind, *, encoder: Encoder, cosine: float, chat: ChatModel | None = None
) -> Redundancy | None:
    """The one that `probe.redundancy` names, or None.

    Args:
        kind: `judge` and `api` both ask `chat`: over the judge's language model, or over the API.
        encoder: for `encoder`.
        cosine: for `encoder`.
        chat: for `judge` and `api`.

    Raises:
        ConfigError: there is no `chat` to ask.
    """
    if kind == "none":
        return None
    if kind == "encoder":
        return EncoderRedundancy(encoder, cosine)
    if chat is None:
        raise ConfigError(f"probe.redundancy={kind} has no model to ask here; take encoder or none")
    return ChatRedundancy(chat)

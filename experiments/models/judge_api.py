"""A judge that is asked in text, behind a server: the prompt and the reading of `JsonJudge`, sent as a chat.

Each response is one request; what else is judged with it changes nothing. A reply without a score and a reply that
never came are kept apart; a prompt that the server's window does not hold is of the first kind, as for `JsonJudge`. A
server that answers nobody costs a training step its scores (NaN, counted); an evaluation asks for the error instead
(`strict`), since nothing it could do without a judge is of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from racelab.experiments.errors import UnreachableError
from racelab.experiments.models.chat import ChatModel, ChatRequest, Reply
from racelab.experiments.models.judge_prompted import (
    Reading,
    describe_judge,
    judge_fields,
    scores_of,
    settings_said,
)
from racelab.experiments.models.prompts.templates import JUDGE_JSON
from racelab.experiments.rng import derived_seed
from racelab.experiments.types import JudgeItem, JudgeReply, JudgeScores


@dataclass(frozen=True, slots=True)
class ApiJudgeSettings:
    """How the judge replies.

    Attributes:
        high: the largest score asked for (100, 10 or 1), mapped to 1.
        max_tokens: of a reply, thinking included.
        temperature: 0 is greedy.
        top_p: nucleus.
        seed: of the draws, for a server that heeds one.
        draw: another number asks for other replies to the same prompts.
        strict: a server that answers nobody is an error, not a row of NaN.
        reading: of a reply; evaluations read as their benchmarks do.
    """

    high: float = 100.0
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    draw: int = 0
    strict: bool = False
    reading: Reading = "last_json"


class ApiJudge:
    """A chat's reply that ends in {"score": number}; implements `ports.Judge`."""

    def __init__(self, chat: ChatModel, settings: ApiJudgeSettings | None = None) -> None:
        """Keeps the parts; the server is first asked by `score`."""
        self.chat = chat
        self.settings = settings or ApiJudgeSettings()

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        """One call per response, all under way at once as far as the model allows; none where the rubric is None.

        Raises:
            UnreachableError: `strict`, and no request can be answered.
        """
        requests = [request for item in items for request in self._requests(item)]
        return scores_of(items, self._replies(requests), self.settings.high, self.settings.reading)

    def redrawn(self, draw: int) -> ApiJudge:
        """The judge that asks for other replies. Also where it is greedy: a server's may differ all the same."""
        return self if draw == self.settings.draw else ApiJudge(self.chat, replace(self.settings, draw=draw))

    def describe(self) -> dict[str, object]:
        """Kind, server and model, template and sampling (JSON values); no key."""
        server = self.chat.describe()
        settings = settings_said(asdict(self.settings), "draw", "strict")
        mine = describe_judge("api", str(server.get("model", "")), JUDGE_JSON, settings)
        return {**mine, "server": server}

    def _requests(self, item: JudgeItem) -> Iterator[ChatRequest]:
        how = self.settings
        seed = derived_seed(how.seed, "draw", how.draw) % 2**31 if how.temperature > 0 else None
        sampling = (how.max_tokens, how.temperature, how.top_p, how.draw)
        for fields in judge_fields(item):
            user = JUDGE_JSON.render(**fields, high=f"{how.high:g}")
            yield ChatRequest(JUDGE_JSON.system, user, *sampling, seed=seed)

    def _replies(self, requests: Sequence[ChatRequest]) -> list[JudgeReply]:
        if not requests:
            return []
        try:
            return [_judged(r) for r in self.chat.complete(requests)]
        except UnreachableError as error:
            if self.settings.strict:
                raise
            return [JudgeReply(None, finished=False, error=str(error), lost=True)] * len(requests)


def _judged(reply: Reply) -> JudgeReply:
    if reply.too_long:  # no other try can give a score: the benchmark's failure, not a missing answer
        return JudgeReply(None, finished=False, error="the prompt exceeds the judge's window")
    return JudgeReply(reply.text, reply.finished, reply.n_tokens, reply.error, lost=reply.text is None)

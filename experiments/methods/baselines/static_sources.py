"""Where static rubrics come from: a chat model that is shown the prompt, or the rubric role of the untrained policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from racelab.configs import schema
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.chat import Calls
from racelab.experiments.models.generator import Generator
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.proposals import Proposer
from racelab.experiments.parts import Parts
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import Prompt, Rubric

Reader = Callable[[str, Prompt], Rubric | None]
"""What a reply to a prompt's request is worth."""


@dataclass(frozen=True, slots=True)
class Written:
    """What came of asking for one prompt's rubric.

    Attributes:
        text: the last reply, None if none came.
        rubric: None if no try gave a usable one.
        tries: replies asked for.
    """

    text: str | None = None
    rubric: Rubric | None = None
    tries: int = 0


class Source(Protocol):
    """Where rubrics come from."""

    name: str
    external: bool
    """An API's calls are counted beside the rubrics."""
    per_prompt: int
    """Rubrics that Table 14 counts for a prompt."""

    def write(self, prompts: Sequence[Prompt], drawn: Sequence[int]) -> list[Written]:
        """Asks for each prompt's rubric; `drawn` says how many replies each prompt had before."""

    def read(self, text: str, prompt: Prompt) -> Rubric | None:
        """The rubric in a text that was kept."""

    def spent(self) -> tuple[int, Calls]:
        """(rubrics asked for, what the chat model counted) so far."""


class ChatSource:
    """A chat model is shown the prompt, in as many tries as it takes, at most `tries`."""

    per_prompt = 1

    def __init__(
        self, proposer: Proposer, template: RoleTemplate, reader: Reader, *, tries: int, name: str
    ) -> None:
        """`name` is `method.proposer`; the template has the one slot `prompt`."""
        self._proposer, self._template, self.read, self._tries = proposer, template, reader, tries
        self.name, self.external = name, name == "api"

    def write(self, prompts: Sequence[Prompt], drawn: Sequence[int]) -> list[Written]:
        """One batch of requests a try."""
        written = [Written()] * len(prompts)
        for n in range(self._tries):
            open_ = [i for i, w in enumerate(written) if w.rubric is None]
            replies = self._proposer.ask(
                [self._proposer.request(self._template, drawn[i] + n, prompt=prompts[i].text) for i in open_]
            )
            for i, reply in zip(open_, replies, strict=True):
                rubric = None if reply.text is None else self.read(reply.text, prompts[i])
                written[i] = Written(reply.text, rubric, n + 1)
        return written

    def spent(self) -> tuple[int, Calls]:
        """See `Source`."""
        return self._proposer.asked, self._proposer.calls


class RoleSource:
    """The rubric role of the untrained policy, one draw a prompt."""

    name = "untrained"
    external = False
    per_prompt = 1

    def __init__(self, generator: Generator, seed: int) -> None:
        """Keeps the parts; `seed` is the run's."""
        self._generator, self._seed = generator, seed
        self._written = 0

    def write(self, prompts: Sequence[Prompt], drawn: Sequence[int]) -> list[Written]:
        """Each prompt alone in its batch, with a generator of its own."""
        return [self._one(p, n) for p, n in zip(prompts, drawn, strict=True)]

    def _one(self, prompt: Prompt, drawn: int) -> Written:
        rng = torch_generator(self._seed, f"static-rubric:{prompt.prompt_id}", drawn)
        ((candidate,),) = self._generator.rubrics([prompt], 1, rng)
        self._written += 1
        return Written(candidate.sample.text, candidate.rubric, tries=1)

    def read(self, text: str, prompt: Prompt) -> Rubric | None:
        """See `Source`."""
        return self._generator.parse(text, prompt).rubric

    def spent(self) -> tuple[int, Calls]:
        """See `Source`."""
        return self._written, Calls()


def api_costs(calls: Calls) -> dict[str, float]:
    """The `cost/api` metrics of one scoring; what was paid for is `cost/calls/external_calls` without `cached`."""
    kinds = ("cached", "retried", "failed", "prompt_tokens", "completion_tokens")
    return {f"cost/api/{kind}": float(getattr(calls, kind)) for kind in kinds}


def open_proposer(config: schema.StaticRubricCommon, parts: Parts) -> Proposer:
    """The run's proposer, counting from now on.

    Raises:
        ConfigError: the run has none.
    """
    if parts.proposer is None:
        raise ConfigError(
            f"method.proposer={config.proposer}: the run has no model that writes rubrics; set method.proposer to "
            "api or untrained"
        )
    return Proposer(parts.proposer, parts.proposal)

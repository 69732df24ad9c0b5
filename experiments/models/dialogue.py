"""Conversations token by token: the pieces of a chat template around replies that are never tokenised again.

A chat template renders a whole conversation at once. To train on exactly the ids that were sampled, a conversation is
grown instead: the opening as the template renders it, then the ids of a reply, then a bridge (end of the reply's turn,
the next user turn, header of the next reply), and so on. The bridge is cut out of the template: a conversation of
marker texts is rendered and the strings between the markers are taken. The cut is checked: the pieces must build what
the template renders, whatever follows; a template that drops, moves or rewrites earlier turns is refused.

What a template does to the text of a reply (trimming, leaving out the thinking of earlier turns) is not done: the ids
that were sampled stay in the context, and those are what the next reply is conditioned on and trained with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from racelab.experiments.episodes import Episode
from racelab.experiments.errors import ModelError
from racelab.experiments.models.text import defang
from racelab.experiments.ports import LanguageModel

Messages = Sequence[Mapping[str, str]]

_SYSTEM, _FIRST, _REPLY, _SECOND, _AGAIN, _THIRD = (f"marker{name}" for name in "PQRSTU")
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_TOOLS = """# Tools

These functions can be called. Each line between the tags describes one of them as JSON:
<tools>
{schemas}
</tools>

A call is a JSON object with the function's name and its arguments, between tags, and ends the reply:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>
The result comes in the next message, between <tool_response> and </tool_response>."""


class Render(Protocol):
    """A chat template: the text of a conversation up to and including the header of the next reply."""

    def __call__(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """`messages` have `role` (system, user, assistant) and `content`; `tools` are OpenAI function schemas."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What stands around a user turn that is not the first.

    Attributes:
        before: end of the reply's turn and header of the user's.
        after: end of the user's turn and header of the next reply.
        strips: the template strips the blanks around a user's text.
    """

    before: str
    after: str
    strips: bool = False


class Dialogue:
    """Openings and bridges of one tokenizer; what `ports.DialogueModel` asks for beside a `LanguageModel`."""

    def __init__(
        self,
        render: Render | None,
        encode: Callable[[str], list[int]],
        *,
        eos_id: int,
        special: Sequence[str] = (),
    ) -> None:
        """Cut the template.

        Args:
            render: the chat template; None for a model without one: texts are then separated by blank lines.
            encode: ids of a text, special tokens written in it recognised, none added.
            eos_id: the token that ends a reply.
            special: spellings of the special tokens; broken up in every text that is put into the conversation.

        Raises:
            ModelError: the template cannot be cut; the message says why.
        """
        self._template, self._encode, self._eos_id = render, encode, eos_id
        self._special = tuple(sorted((s for s in special if s.strip()), key=len, reverse=True))
        self._pieces = cut(self._render) if render is not None else Pieces("\n\n", "\n\n")
        self._knows_tools: bool | None = None

    def opening(self, system: str, user: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of system prompt, first user turn and the header of the reply.

        Args:
            system: "" leaves the system turn out.
            user: the first user turn.
            tools: OpenAI function schemas; written by the template where it can, else by us into the system prompt.
        """
        if tools and not self._takes_tools():
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = "\n\n".join(part for part in (system, _TOOLS.format(schemas=schemas)) if part)
            tools = ()
        return self._encode(self._render(_turns(self._safe(system), self._safe(user)), tools or None))

    def bridge(self, user: str, *, ended: bool) -> list[int]:
        """Ids between a reply and the next: end of turn (unless `ended`: it was sampled), user turn, next header."""
        text = self._safe(user)
        p = self._pieces
        ids = self._encode(f"{p.before}{text.strip() if p.strips else text}{p.after}")
        return ids[1:] if ended and ids[:1] == [self._eos_id] else ids

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation's text."""
        if self._template is None:
            return "".join(f"{m['content']}\n\n" for m in messages)
        try:
            return self._template(messages, tools)
        except Exception as error:  # a template is a program; it raises what it likes
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(
                f"the model's chat template refuses a conversation with a system turn ({why}); choose a model whose "
                "template takes one"
            ) from error

    def _takes_tools(self) -> bool:
        """Whether the template writes tools, and the system prompt beside them."""
        if self._knows_tools is None:
            name = _PROBE_TOOL["function"]["name"]
            try:
                text = self._render(_turns(_SYSTEM, _FIRST), [_PROBE_TOOL]) if self._template else ""
            except ModelError:  # it trips over tools
                text = ""
            self._knows_tools = name in text and _SYSTEM in text and _FIRST in text
        return self._knows_tools

    def _safe(self, text: str) -> str:
        """The text with special tokens broken up, so that no page or reflection can end a turn."""
        text = defang(text)
        for s in self._special:
            at = len(s) - len(s.lstrip()) + 1
            text = text.replace(s, f"{s[:at]} {s[at:]}" if len(s) > at else " ")
        return text


def _turns(system: str, user: str, *rest: str) -> list[dict[str, str]]:
    """Messages; `rest` are assistant and user in turn."""
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": user})
    return turns + [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(rest)]


def cut(render: Render) -> Pieces:
    """The strings around a user turn, cut out of a rendered conversation and checked against it.

    Raises:
        ModelError: the pieces do not build what the template renders.
    """
    one = render(_turns(_SYSTEM, _FIRST))
    two = render(_turns(_SYSTEM, _FIRST, _REPLY, _SECOND))
    three = render(_turns(_SYSTEM, _FIRST, _REPLY, _SECOND, _AGAIN, _THIRD))
    if [one.count(m) for m in (_SYSTEM, _FIRST)] != [1, 1]:
        raise _uncut("it does not show the system prompt and the first user turn once each")
    if not two.startswith(one + _REPLY):
        raise _uncut("what stands before a reply changes once the conversation goes on")
    before, found, after = two[len(one) + len(_REPLY) :].partition(_SECOND)
    if not found or three != f"{two}{_AGAIN}{before}{_THIRD}{after}":
        raise _uncut("a turn is written differently, or left out, once others follow")
    spaced = f" \n{_SECOND} \n\n  {_SECOND}\n "
    shown = render(_turns(_SYSTEM, _FIRST, _REPLY, spaced))
    for text, strips in ((spaced, False), (spaced.strip(), True)):
        if shown == f"{one}{_REPLY}{before}{text}{after}":
            return Pieces(before, after, strips)
    raise _uncut("it changes the text of a user turn")


def _uncut(why: str) -> ModelError:
    return ModelError(
        f"the model's chat template cannot be used turn by turn: {why}; choose a model whose template only appends"
    )


def drift(model: LanguageModel, episode: Episode) -> int:
    """Sampled ids that tokenising the decoded replies again would change; a diagnostic, nothing is trained on it.

    Per reply, without its end token: the ids between the first and the last difference, counted in the longer of the
    two sequences.
    """
    total = 0
    for turn in episode.turns:
        ids = list(turn.tokens)
        if ids and ids[-1] == model.eos_id:
            ids.pop()
        again = model.encode(model.decode(ids))
        same = _agree(ids, again)
        total += max(len(ids), len(again)) - same - _agree(ids[same:][::-1], again[same:][::-1])
    return total


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n

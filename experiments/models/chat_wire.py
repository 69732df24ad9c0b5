"""The chat completions of OpenAI's API as a server sees them: bodies into requests, samples into replies.

What would change the reply and is not done here is refused by name, never ignored. What only labels a request is
ignored. Texts are cleaned as `text.defang` does it, so that an answer that is judged cannot end the judge's turn.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from racelab.experiments.models.api_reply import clean
from racelab.experiments.models.text import defang
from racelab.experiments.types import Sample

MAX_STOPS: Final = 16
_MAX_STOP: Final = 200  # characters
_LABELS: Final = frozenset(
    {
        "model",
        "messages",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Fields that are taken with a value that changes nothing (null too)."""
_READ: Final = frozenset(
    {
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "chat_template_kwargs",
    }
)
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class WireError(Exception):
    """A request that cannot be answered; one line, without what was sent.

    Attributes:
        status: of HTTP.
        field: which one, or "".
        code: OpenAI's word for it, or "".
    """

    def __init__(self, text: str, *, status: int = 400, field: str = "", code: str = "") -> None:
        """Keeps the parts."""
        super().__init__(text)
        self.status, self.field, self.code = status, field, code


@dataclass(frozen=True, slots=True)
class Completion:
    """A request as it is to be answered.

    Attributes:
        messages: role (system, user, assistant) and content of each turn.
        n: replies.
        max_tokens: of one reply, or less where the window leaves less; None: what it leaves.
        temperature: 0 is greedy.
        top_p: nucleus.
        stop: a reply ends before the first of these.
        seed: of the draws; None: other ones each time.
        template: further variables of the chat template.
    """

    messages: tuple[Mapping[str, str], ...]
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    template: Mapping[str, Any] | None = None


def parse(body: bytes, name: str, most: int) -> Completion:
    """What a body asks for.

    Args:
        body: of the POST.
        name: the model that is served; another is not there.
        most: replies to one request.

    Raises:
        WireError: names the field and what it takes.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise WireError("the body is no JSON object")
    sent = {k: v for k, v in value.items() if v is not None}
    _refuse_what_is_not_done(sent)
    if sent.get("model") != name:
        raise WireError(
            f"model: only {name!r} is served here", status=404, field="model", code="model_not_found"
        )
    budget = "max_completion_tokens" if "max_completion_tokens" in sent else "max_tokens"
    return Completion(
        messages=_messages(sent.get("messages")),
        n=_whole(sent, "n", 1, 1, most),
        max_tokens=_whole(sent, budget, 1, 1, 1 << 31) if budget in sent else None,
        temperature=_number(sent, "temperature", 0.0, 2.0),
        top_p=_number(sent, "top_p", 0.0, 1.0, above=True),
        stop=_stop(sent.get("stop")),
        seed=_whole(sent, "seed", 0, -(1 << 63), (1 << 63) - 1) if "seed" in sent else None,
        template=_template(sent.get("chat_template_kwargs")),
    )


def _refuse_what_is_not_done(sent: Mapping[str, Any]) -> None:
    for field in sorted(sent.keys() - _LABELS - _READ):
        neutral = _NEUTRAL.get(field)
        known = clean(field)[:40]
        if neutral is None:
            raise WireError(f"{known}: is not supported here; leave it out", field=known)
        # A bool is a number in Python: 0 must not pass for false.
        if not any(
            sent[field] == v and isinstance(sent[field], bool) == isinstance(v, bool) for v in neutral
        ):
            what = "streaming is" if field == "stream" else "anything but its default is"
            raise WireError(f"{known}: {what} not supported here; leave it out", field=known)


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise WireError("messages: must be a list of at least one message", field="messages")
    found = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise WireError(f"{where}.role: must be system, user or assistant", field=f"{where}.role")
        found.append({"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")})
    return tuple(found)


def _content(value: object, where: str) -> str:
    """A text, or the texts of a list of parts."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in parts]
    if not all(isinstance(t, str) for t in texts):
        raise WireError(f"{where}: must be a text, or a list of parts of type text", field=where)
    return defang(clean("".join(str(t) for t in texts)))


def _whole(sent: Mapping[str, Any], field: str, default: int, least: int, most: int) -> int:
    value = sent.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise WireError(f"{field}: must be a whole number from {least} to {most}", field=field)
    return value


def _number(sent: Mapping[str, Any], field: str, least: float, most: float, *, above: bool = False) -> float:
    """A number, 1 if left out; `above`: more than `least`."""
    value = sent.get(field, 1.0)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    if not fits or (above and value == least) or not math.isfinite(value):
        opening = "above" if above else "from"
        raise WireError(f"{field}: must be a number {opening} {least:g} to {most:g}", field=field)
    return float(value)


def _stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and all(isinstance(s, str) and 0 < len(s) <= _MAX_STOP for s in stops)
    if not fits or not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise WireError(
            f"stop: must be a text, or a list of at most {MAX_STOPS}, of 1 to {_MAX_STOP} characters",
            field="stop",
        )
    return tuple(map(clean, stops))


def _template(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    fits = isinstance(value, dict) and all(
        k == "enable_thinking" and isinstance(v, bool) for k, v in value.items()
    )
    if not fits or not isinstance(value, dict):
        raise WireError(
            "chat_template_kwargs: takes enable_thinking, true or false, alone", field="chat_template_kwargs"
        )
    return value


def too_long(n_prompt: int, window: int) -> WireError:
    """The error of a request whose messages alone fill the window."""
    return WireError(
        f"the model's window is {window} tokens: {n_prompt} of the messages leave no room for a reply",
        field="messages",
        code="context_length_exceeded",
    )


def reply(request: Completion, name: str, n_prompt: int, samples: Sequence[Sample]) -> dict[str, Any]:
    """The body of an answer; `samples` are in the order of the choices."""
    n_reply = sum(len(s.tokens) for s in samples)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [_choice(i, s, request.stop) for i, s in enumerate(samples)],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_reply,
            "total_tokens": n_prompt + n_reply,
        },
    }


def _choice(index: int, sample: Sample, stops: Sequence[str]) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": before(sample.text, stops)},
        "logprobs": None,
        "finish_reason": "stop" if sample.finished else "length",
    }


def before(text: str, stops: Sequence[str]) -> str:
    """The text up to where the first stop string begins."""
    return text[: min((i for i in map(text.find, stops) if i >= 0), default=len(text))]


def models(name: str, window: int, since: int) -> dict[str, Any]:
    """The body of `GET /v1/models`; `since`: seconds since 1970."""
    one = {"id": name, "object": "model", "created": since, "owned_by": "racelab", "max_model_len": window}
    return {"object": "list", "data": [one]}


def problem(text: str, status: int, field: str = "", code: str = "") -> dict[str, Any]:
    """The body of an answer that says what is wrong."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": text, "type": kind, "param": field or None, "code": code or None}}

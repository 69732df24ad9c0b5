"""What a server's answer means: the reply in its body, or why there is none. Knows neither the SDK nor the settings."""

from __future__ import annotations

import contextlib
import email.utils
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from racelab.experiments.models.chat import Calls, Reply

_MAX_BODY: Final = 16 << 20  # bytes; a completion has thousands
_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|exceed_context_size"  # OpenAI's code, and racelab's own; llama.cpp's type
    r"|maximum (context|model) length"  # vLLM has no code for it
    r"|exceeds? (the )?(available )?context (size|length|window)",
    re.IGNORECASE,
)
_CALLS: Final = 3  # without any reply, after retries: whoever waits longer trains on nothing


class FailedTryError(Exception):
    """One try that gave no reply; the text says why, in words of ours.

    Attributes:
        again: another try may succeed.
        wait_s: seconds that the server asks to wait before it.
        absent: nothing listens at the address.
        refused: an HTTP status that says that this request will never be answered.
        general: another request would have failed too (no connection, no quota).
        too_long: the request does not fit the model's window.
    """

    def __init__(
        self,
        reason: str,
        *,
        again: bool = True,
        wait_s: float = 0.0,
        absent: bool = False,
        refused: bool = False,
        general: bool = False,
        too_long: bool = False,
    ) -> None:
        """Keeps the parts."""
        super().__init__(reason)
        self.again, self.wait_s, self.absent = again, wait_s, absent
        self.refused, self.general, self.too_long = refused, general, too_long


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's reply, its counts, and why there is no reply."""

    reply: Reply
    calls: Calls
    failure: FailedTryError | None = None


class Silence:
    """Notices a server that answers nobody. Replies from a cache say nothing about it.

    One request that is asked again and again (a prompt that a content filter refuses) is no sign of that: it counts
    once, unless its failure is a general one.
    """

    def __init__(self) -> None:
        """Nothing asked yet."""
        self._replied = False  # ever
        self._calls = 0  # in a row without a reply
        self._failed: set[str] = set()  # what was asked in them

    def heed(self, asked: Sequence[tuple[str, Outcome]]) -> str:
        """What to say if there is no use in going on, else "".

        Args:
            asked: of one call, what was put to the server (the user's turn) and what came of it.
        """
        failures = [outcome.failure for _, outcome in asked if outcome.failure is not None]
        if len(failures) < len(asked):
            self._replied, self._calls = True, 0
            self._failed.clear()
        if len(failures) < len(asked) or not failures:
            return ""
        turns = {turn for turn, _ in asked}
        if turns - self._failed or any(f.general for f in failures):
            self._calls += 1
        self._failed |= turns
        if not self._replied and len(turns) > 1 and all(f.refused for f in failures):
            return f"refuses every request ({failures[-1]})"
        return f"gave no reply in {_CALLS} calls in a row ({failures[-1]})" if self._calls >= _CALLS else ""


def clean(text: str) -> str:
    """Without halves of surrogate pairs, which no file and no request can hold."""
    return text.encode("utf-8", "replace").decode()


def read_body(chunks: Iterable[bytes], deadline: float) -> bytes:
    """The whole body, each part of which came in time; `deadline` (monotonic seconds) holds for all of it.

    Raises:
        FailedTryError: it takes too long or does not end.
    """
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if time.monotonic() > deadline:
            raise FailedTryError("the answer was too slow")
        if len(body) > _MAX_BODY:
            raise FailedTryError(f"the answer is larger than {_MAX_BODY} bytes")
    return bytes(body)


def completion(content_type: str, body: bytes, *, empty_ok: bool = False) -> Outcome:
    """The reply in the body of a successful answer.

    Args:
        content_type: of the answer.
        body: of the answer.
        empty_ok: a reply without a word is one too, such as that of a model which had not ended its thinking.

    Raises:
        FailedTryError: it holds none.
    """
    if not content_type.endswith("json"):
        raise FailedTryError("the answer is not JSON by its content type; is api.base_url an API's address?")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise FailedTryError("the answer is malformed JSON") from None
    choices = value.get("choices") if isinstance(value, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise FailedTryError("the answer holds no choices")
    text, cut = message.get("content"), choice.get("finish_reason") == "length"
    if empty_ok and text is None:
        text = ""
    if not isinstance(text, str) or not (text or empty_ok):
        # A model that thinks may have used up max_tokens before its first word; asking again would not help.
        raise FailedTryError(
            "cut by max_tokens before the first word" if cut else "the reply is empty", again=not cut
        )
    usage = value.get("usage")
    n_tokens = _count(usage, "completion_tokens")
    calls = Calls(prompt_tokens=_count(usage, "prompt_tokens"), completion_tokens=n_tokens)
    return Outcome(Reply(clean(text), not cut, reasoning=_reasoning(message), n_tokens=n_tokens), calls)


def _reasoning(message: Mapping[str, object]) -> str:
    """The thinking that a server keeps apart: vLLM and others name it one way or the other."""
    found = (message.get(name) for name in ("reasoning", "reasoning_content"))
    return next((clean(text) for text in found if isinstance(text, str) and text), "")


def _count(usage: object, name: str) -> int:
    """A count of tokens; 0 where the server gives none."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def says_too_long(error: object) -> bool:
    """Whether the error object of a refusal says that the request does not fit the window; servers differ in how."""
    if not isinstance(error, dict):
        return False
    said = (error.get(name) for name in ("code", "type", "message"))
    return any(isinstance(text, str) and _TOO_LONG.search(text[:1000]) is not None for text in said)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header, given as a number or as a date; 0 without one that can be read."""
    value = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        seconds = float(value)
        return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0

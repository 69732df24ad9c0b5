"""IFEval's checkers, as lm-eval has them: found, made repeatable, and asked about one text."""

from __future__ import annotations

import importlib.util
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from racelab.experiments.errors import MissingDependencyError
from racelab.experiments.evaluation.nltk_data import ensure_punkt


class Checker(Protocol):
    """One instruction: told its arguments, then asked whether a text follows it."""

    def build_description(self, **arguments: Any) -> Any:
        """Takes the arguments; what it leaves open is drawn from Python's global generator."""

    def get_instruction_args(self) -> Mapping[str, Any] | None:
        """The arguments in force."""

    def check_following(self, value: str) -> bool:
        """Whether the text follows the instruction; may raise anything."""


Checkers = Mapping[str, Callable[[str], Checker]]
"""Instruction id -> what makes its checker."""

_PACKAGES = ("lm_eval", "langdetect", "immutabledict", "nltk")
_LANGUAGE_SEED = 0
_draws = threading.Lock()


@cache
def load_checkers() -> Checkers:
    """lm-eval's checkers; importing them takes about two seconds. Nothing is downloaded and nothing printed.

    Their language detection draws at random: it is seeded here, so that a text is always found to be in one language.

    Raises:
        MissingDependencyError: a package or NLTK's data are missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"ifeval needs {', '.join(missing)}: pip install 'racelab[eval]'")
    ensure_punkt()
    from langdetect import DetectorFactory
    from langdetect.detector_factory import init_factory

    DetectorFactory.seed = _LANGUAGE_SEED
    init_factory()  # at its first use it would be half made for a second thread
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    checkers: Checkers = INSTRUCTION_DICT
    return checkers


def made(checkers: Checkers, instruction: str, arguments: Mapping[str, Any], prompt: str) -> Checker:
    """A checker with its arguments.

    Arguments that are null, 0, "" or empty count as not given (the hub's table has a column for every argument of every
    instruction). For what is then open lm-eval draws, and for a letter that is none ("#") too: here the draw depends on
    instruction and prompt alone, and Python's generator is left as it was.

    Raises:
        Exception: whatever the checker says to its arguments.
    """
    with _drawn_from(f"{instruction}\n{prompt}"):
        checker = checkers[instruction](instruction)
        checker.build_description(**{name: value for name, value in arguments.items() if value})
        if "prompt" in (checker.get_instruction_args() or {}):
            checker.build_description(prompt=prompt)
    return checker


def follows(checker: Checker, *readings: str) -> bool:
    """Whether one of these readings of a text follows the instruction, taken in this order; a blank one does not.

    A reading that the checker chokes on ends the search: False, as IFEval counts it.
    """
    try:
        return any(reading.strip() and checker.check_following(reading) for reading in readings)
    except Exception:  # third-party checks of any text: they raise what they like
        return False


@contextmanager
def _drawn_from(words: str) -> Iterator[None]:
    with _draws:
        state = random.getstate()
        random.seed(zlib.crc32(words.encode("utf-8", "surrogatepass")))
        try:
            yield
        finally:
            random.setstate(state)

"""Prompts from reasoning-gym, and its scorers behind `reasoning_gym` checks.

Extraction: what is scored is, by the first rule that applies,

1. the text of the last `<answer>...</answer>`;
2. what follows the last "answer is" or "answer:";
3. the response.

Of 2 and 3 only one line is taken, the first of 2 and the last of 3, unless the reference answer
has several lines or there is none. Outer blanks and Markdown stars are dropped, and a final full stop if the
reference has none. If the reference is a plain number, the last number of the extract is scored, without
thousands separators. Only this one candidate is ever tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from racelab.experiments.data.rows import clean_text
from racelab.experiments.errors import ConfigError, DataError, MissingDependencyError
from racelab.experiments.types import Prompt

THRESHOLD = 0.99
"""A response passes from this score on; the scorers give 1.0 for a right answer, less for a near one."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKER = re.compile(r"answer(?:\s+is)?\s*:|answer\s+is\b", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def read_gym(datasets: Sequence[str], size: int, seed: int) -> list[Prompt]:
    """`size` prompts of each data set, each with a `reasoning_gym` check.

    The check holds the question, the answer and the metadata as JSON, so a stored prompt can be scored
    without generating the data set again. An entry whose own answer is then scored differently is refused.

    Args:
        datasets: names as `reasoning_gym.create_dataset` takes them.
        size: prompts per data set, >= 1.
        seed: >= 0, of the generator of each data set.

    Raises:
        ConfigError: an unknown name, a name given twice, `size` < 1 or `seed` < 0.
        DataError: an entry cannot be kept as JSON.
        MissingDependencyError: reasoning-gym is not installed.
    """
    gym = _import()
    if size < 1 or seed < 0:
        raise ConfigError(f"data.size={size}, data.seed={seed}: size must be >= 1 and seed >= 0")
    if len(set(datasets)) < len(datasets):
        raise ConfigError("data.datasets: a name is given twice; list each once")
    prompts = []
    for name in datasets:
        _known(name)
        try:
            data = gym.create_dataset(name, size=size, seed=seed)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"data.datasets: {name} cannot be made with size={size}: {error}") from None
        prompts += [_prompt(name, seed, i, data[i], data.score_answer) for i in range(size)]
    return prompts


def _prompt(name: str, seed: int, index: int, raw: Mapping[str, Any], scorer: Any) -> Prompt:
    prompt_id = f"{name}-{seed}-{index}"
    where = f"reasoning-gym {name}[{index}]"
    kept = {key: raw[key] for key in ("question", "answer", "metadata") if key in raw}
    try:
        entry = json.loads(json.dumps(kept))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be kept as JSON ({error}); leave {name} out") from None
    answer = raw["answer"]
    if isinstance(answer, str) and scorer(answer, raw) != _call(scorer, answer, entry):
        raise DataError(f"{where}: scored differently once kept as JSON; leave it out of data.datasets")
    check = {"kind": "reasoning_gym", "dataset": name, "entry": entry, "threshold": THRESHOLD}
    return Prompt(prompt_id, clean_text(raw["question"], where, "question"), "reasoning-gym", name, check)


def extract_answer(text: str, reference: object = None) -> str:
    """The candidate that is scored (rules in the module's docstring); empty if there is none."""
    tags = _TAG.findall(text)
    markers = list(_MARKER.finditer(text))
    one_line = reference is not None and "\n" not in str(reference).strip()
    if tags:
        found = str(tags[-1])
    elif markers:
        found = text[markers[-1].end() :].strip()
        found = found.split("\n", 1)[0] if one_line else found
    else:
        found = text.strip()
        found = found.rsplit("\n", 1)[-1] if one_line else found
    found = found.strip().strip("*").strip()
    if not (isinstance(reference, str) and reference.rstrip().endswith(".")):
        found = found.removesuffix(".").strip()
    if isinstance(reference, str) and _PLAIN_NUMBER.fullmatch(reference.strip()):
        numbers = _PLAIN_NUMBER.findall(found)
        return str(numbers[-1]).replace(",", "") if numbers else found
    return found


def score_entry(dataset: str, entry: Mapping[str, Any], text: str) -> float:
    """The data set's own score, in [0, 1], of the answer extracted from a response.

    Raises:
        DataError: unknown data set, or an entry that its scorer cannot read.
        MissingDependencyError: reasoning-gym is not installed.
    """
    candidate = extract_answer(text, entry.get("answer"))
    if not candidate:
        return 0.0
    value = _call(_scorer(dataset), candidate, entry)
    if value is None:
        raise DataError(f"reasoning_gym check: {dataset} cannot read the entry; load the data again")
    return min(1.0, max(0.0, value))


def _call(scorer: Any, answer: str, entry: Mapping[str, Any]) -> float | None:
    """The score, or None if the scorer fails on its own reference answer, i.e. cannot read the entry.

    Scorers parse free text and may raise on nonsense; that is a wrong answer, not an error.
    """
    try:
        return float(scorer(answer, entry))
    except Exception:
        try:
            scorer(entry.get("answer"), entry)
        except Exception:
            return None
        return 0.0


@cache
def _scorer(dataset: str) -> Any:
    _known(dataset, DataError)
    from reasoning_gym.factory import get_score_answer_fn

    try:
        return get_score_answer_fn(dataset)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym check: {dataset} has no scorer of its own: {error}") from None


def _known(name: str, error: type[ConfigError] | type[DataError] = ConfigError) -> None:
    _import()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(DATASETS)}, e.g. chain_sum"
        raise error(f"data.datasets: reasoning-gym has no data set {name!r}; {hint}")


def _import() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise MissingDependencyError(
            "reasoning-gym prompts need: pip install 'racelab[reasoning-gym]'"
        ) from None
    return reasoning_gym

"""Real HotpotQA questions, where a sample is at hand: a scripted policy searches and answers; official rewards.

The sample (questions with contexts, and the passages of all contexts) is looked for in `RACELAB_TEST_DATA`, else in
`../shared/data` beside the repository.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.models.retrieval import open_engine
from racelab.experiments.models.retriever_client import LocalRetriever
from racelab.experiments.tasks.hotpotqa.data import read_rows, to_instance
from racelab.experiments.tasks.hotpotqa.env import HotpotQaEnvironment, Rules

_FOLDER = os.environ.get("RACELAB_TEST_DATA")
FOLDER = Path(_FOLDER) if _FOLDER else Path(__file__).resolve().parents[5] / "shared" / "data"
QUESTIONS, CORPUS = FOLDER / "hotpotqa_distractor.jsonl", FOLDER / "hotpotqa_corpus.jsonl"
pytestmark = pytest.mark.skipif(
    not (QUESTIONS.is_file() and CORPUS.is_file()), reason="no sample of HotpotQA here"
)


def official(prediction: str, gold: str) -> tuple[float, float]:
    """EM and F1 as HotpotQA's evaluation defines them, written from the definition."""

    def normal(text: str) -> str:
        kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())

    ours, right = normal(prediction), normal(gold)
    em = float(ours == right)
    if ours != right and {ours, right} & {"yes", "no", "noanswer"}:
        return em, 0.0
    common = sum((Counter(ours.split()) & Counter(right.split())).values())
    if common == 0:
        return em, 0.0
    p, r = common / len(ours.split()), common / len(right.split())
    return em, 2 * p * r / (p + r)


def answers(row: dict[str, Any], read: str) -> list[str]:
    """What a policy might say: the right answer, what it read, half of it, more than it, yes and nonsense."""
    gold = row["answer"]
    sentence = next((s for s in re.split(r"(?<=\.) ", read) if gold.lower() in s.lower()), read[:60])
    return [gold, f"The {gold}.", f"{gold} of course", " ".join(gold.split()[:1]), sentence, "yes", "qqq"]


@pytest.fixture(scope="module")
def retriever() -> LocalRetriever:
    return LocalRetriever(open_engine("bm25", CORPUS))


@pytest.mark.parametrize("yes_no", [True, False])
def test_rewards_are_the_official_numbers(retriever: LocalRetriever, yes_no: bool) -> None:
    rules = Rules(official_yes_no=yes_no)
    compared, found = 0, []
    for where, row in read_rows(QUESTIONS):
        instance = to_instance(row, where)
        for kind in range(7):
            environment = HotpotQaEnvironment(
                instance.data["question"], instance.data["answers"], retriever, rules, instance.data["titles"]
            )
            environment.reset()
            read = ""
            for query in (row["question"], *instance.data["titles"]):
                body = json.dumps({"name": "search", "arguments": {"query": query, "top_k": 5}})
                seen = environment.step(f"<tool_call>\n{body}\n</tool_call>")
                assert not seen.done
                read += seen.text
            answer = answers(dict(row), read)[kind].replace("{", "").replace("}", "")
            last = environment.step(f"I am sure: \\boxed{{{answer}}}")
            assert last.done
            result = environment.result()
            em, f1 = official(answer, row["answer"])
            if kind == 0:
                found.append(result.metrics["evidence"])
            if not yes_no and {answer.lower(), row["answer"].lower()} & {"yes", "no"} and em == 0:
                continue  # here D.2 and the official rule part
            assert result.metrics["em"] == em
            assert result.metrics["f1"] == pytest.approx(f1)
            assert result.reward == pytest.approx(1.0 if em else f1 if f1 >= 0.3 else 0.0)
            assert result.solved == bool(em)
            compared += 1
    assert len(found) == 50
    assert compared == 350 if yes_no else compared > 250
    assert sum(found) / len(found) > 0.95  # searching for a passage by its title finds it

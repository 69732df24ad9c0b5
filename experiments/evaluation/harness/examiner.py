"""Asks lm-eval's requests and has lm-eval mark what comes.

A chat model is sent what lm-eval sends under `--apply_chat_template` without `--fewshot_as_multiturn`: the task's
description as the system's turn where it has one, and one user turn that holds the few-shot examples and the question.
Decoding, stop strings and few-shot counts are the task's; where a task sets no length, lm-eval's 256 tokens are the
bound. A thinking block is part of the answer, as in lm-eval unless it is told the closing tag.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from racelab.experiments.errors import ConfigError, RacelabError
from racelab.experiments.evaluation.harness.loading import Item, StockBenchmark, seeded
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, Mark, Status, Subject
from racelab.experiments.ports import LanguageModel

_OWN_TOKENS = 256
"""lm-eval's bound where a task has none."""
_INVALID = "[invalid]"
"""What lm-eval's filters give where their pattern matches nothing."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class LmEvalExaminer:
    """One benchmark under protocol `lm-eval`; implements `Examiner`."""

    def __init__(
        self,
        benchmark: StockBenchmark,
        subject: Subject,
        *,
        model: LanguageModel | None = None,
        max_tokens: int | None = None,
        thinking: bool | None = None,
    ) -> None:
        """Turns lm-eval's requests into questions.

        Args:
            benchmark: from `load_stock`.
            subject: answers what is generated.
            model: the same model, for tasks that rate choices by their log-probs; None: it gives none.
            max_tokens: bound of an answer: in place of lm-eval's 256 where the task has none; no task goes above it.
            thinking: `Ask.thinking`.

        Raises:
            ConfigError: the benchmark rates choices and there is no model for that.
        """
        self._benchmark, self._subject, self._model = benchmark, subject, model
        if benchmark.stock.likelihoods and model is None:
            raise ConfigError(
                f"{benchmark.stock.name} rates choices by log-probs, which this model does not give; leave it out"
            )
        self._examples = tuple(item.example for item in benchmark.items)
        generated = [i for i, item in enumerate(benchmark.items) if not _is_rated(item)]
        self._asked = {i: place for place, i in enumerate(generated)}
        self._asks = [ask_of(benchmark.items[i], max_tokens, thinking) for i in generated]

    @property
    def name(self) -> str:
        """Of the benchmark, ours."""
        return self._benchmark.stock.name

    @property
    def examples(self) -> Sequence[Example]:
        """All, in lm-eval's order."""
        return self._examples

    def examine(self, wanted: frozenset[str]) -> Iterator[Examined]:
        """See the protocol. Questions are answered first, then choices rated, one example at a time."""
        todo = [i for i, example in enumerate(self._examples) if example.example_id in wanted]
        places = {self._asked[i]: i for i in todo if i in self._asked}
        if places:
            for place, answers in self._subject.answers(self._asks, list(places), self.name):
                yield self._answered(self._benchmark.items[places[place]], self._asks[place], answers)
        for i in todo:
            if i not in self._asked:
                yield self._rated(self._benchmark.items[i])

    def _answered(self, item: Item, ask: Ask, answers: Sequence[Answer]) -> Examined:
        rows = [_row(idx, answer) for idx, answer in enumerate(answers)]
        texts = [answer.text for answer in answers if answer.text is not None]
        if len(texts) < len(answers):
            return Examined(item.example, (Mark(self.name, math.nan, status="lost"),), tuple(rows))
        mark, extracted, error = self._mark(item, [[_cut(text, ask.stop) for text in texts]])
        return Examined(
            item.example,
            (mark,),
            tuple(
                {**row, "extracted": extracted, "score": mark.score, "error": row["error"] or error}
                for row in rows
            ),
        )

    def _rated(self, item: Item) -> Examined:
        """The choices' log-probs, in one batch of their own, so that they depend on no other example.

        A prompt too long for the window loses its beginning, as in lm-eval.
        """
        model = self._model
        assert model is not None  # refused in the constructor
        system, user = _turns(item.instances[0])
        choices = [str(instance.args[1]) for instance in item.instances]
        prefix, tails = model.chat(user, system), [model.encode(choice) for choice in choices]
        room = max(model.window - max(map(len, tails)), 1)
        sums = [float(logps.sum()) for logps in model.logprobs([(prefix[-room:], tails)])[0]]
        # lm-eval also says whether a choice is what greedy decoding gives; no task here asks.
        mark, _, error = self._mark(item, [[(value, False)] for value in sums])
        best = max(range(len(sums)), key=sums.__getitem__)
        cut = f"the prompt's first {len(prefix) - room} tokens do not fit" if len(prefix) > room else ""
        row = {
            **_row(0, Answer(choices[best], error=cut or error)),
            "extracted": json.dumps([round(value, 6) for value in sums]),
            "score": mark.score,
        }
        return Examined(item.example, (mark,), (row,))

    def _mark(self, item: Item, responses: Sequence[list[Any]]) -> tuple[Mark, str, str]:
        """The mark, what the primary metric's filter took from the answer, and what went wrong in marking.

        Args:
            item: the example.
            responses: of the model, one list per request.
        """
        primary = self._benchmark.stock.primary
        try:
            with seeded():  # some checkers draw what the data leave open
                metrics, filtered = _measured(item, responses)
        except RacelabError:
            raise
        except (
            Exception
        ) as error:  # its scorers are not made for every text, and lm-eval itself would end here
            reason = f"lm-eval could not mark it: {type(error).__name__}"
            return Mark(self.name, 0.0, {primary: 0.0}, "unparsed"), "", reason
        key = primary.partition(".")[2] or next(iter(filtered))
        status: Status = "unparsed" if filtered[key] == _INVALID else "scored"
        return Mark(self.name, float(metrics[primary]), metrics, status), filtered[key], ""


def ask_of(item: Item, max_tokens: int | None = None, thinking: bool | None = None) -> Ask:
    """The question of an example that is answered by generating."""
    (instance,) = item.instances
    system, user = _turns(instance)
    decoding: Mapping[str, Any] = instance.args[1]
    own = next((int(decoding[key]) for key in _LENGTHS if decoding.get(key)), None)
    bound = (max_tokens or _OWN_TOKENS) if own is None else min(own, max_tokens or own)
    stops = decoding.get("until") or ()
    return Ask(
        user,
        n=int(instance.repeats or 1),
        max_tokens=bound,
        temperature=0.0 if decoding.get("do_sample") is False else float(decoding.get("temperature", 0.0)),
        top_p=float(decoding.get("top_p", 1.0)),
        system=system,
        stop=tuple(stop for stop in ([stops] if isinstance(stops, str) else stops) if stop),
        thinking=thinking,
    )


def _is_rated(item: Item) -> bool:
    return bool(item.instances[0].request_type == "loglikelihood")


def _turns(instance: Any) -> tuple[str | None, str]:
    """System's and user's turn."""
    turns = {message["role"]: message["content"] for message in json.loads(instance.args[0])}
    return turns.get("system"), turns["user"]


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string, whether or not the engine left it in."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _measured(item: Item, responses: Sequence[list[Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Metrics and filtered answers of one example, by lm-eval."""
    for instance, given in zip(item.instances, responses, strict=True):
        instance.resps, instance.filtered_resps = list(given), {}
    for ensemble in item.task._filters:  # what task.apply_filters does, for the requests of one document
        ensemble.apply(list(item.instances))
    metrics: dict[str, Any] = {}
    filtered: dict[str, str] = {}
    for key, first in item.instances[0].filtered_resps.items():
        filtered[key] = str(first)
        found = item.task.process_results(
            item.instances[0].doc, [i.filtered_resps[key] for i in item.instances]
        )
        for metric, value in found.items():
            metrics[metric if key == "none" else f"{metric}.{key}"] = _plain(value)
    return metrics, filtered


def _plain(value: Any) -> Any:
    """A JSON number, or a list of them."""
    return [float(v) for v in value] if isinstance(value, list | tuple) else float(value)


def _row(idx: int, answer: Answer) -> dict[str, Any]:
    """A row of `eval_answers`, before it is marked."""
    return {
        "idx": idx,
        "role": "answer",
        "text": answer.text,
        "finished": answer.finished,
        "n_tokens": answer.n_tokens,
        "error": answer.error,
    }

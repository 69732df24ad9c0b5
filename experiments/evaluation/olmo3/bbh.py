"""BIG-Bench Hard: 27 tasks whose answers are words, numbers, brackets or letters; each step of reasoning is invited.

The thinking is scored with the rest, so an answer in it can count. Kept oddities: punctuation is ignored except in
`dyck_languages`, and with it the sign of a number; no closing sentence is asked for. Quirk `bbh-bare-letter`: the
protocol's last resort for letters without parentheses has a typing error and matches nothing, so "the answer is B"
scores 0. Without the quirk the last stand-alone capital counts where no letter in parentheses was found (the protocol
means to try it before one in parentheses with no phrase).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from racelab.experiments.data.rows import listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    examined,
    question,
    scored_text,
    text_field,
)
from racelab.experiments.evaluation.olmo3.extract import IS_CORRECT, TEMPLATES, Finder, last, same, squeeze
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

BARE_LETTER = "bbh-bare-letter"
LETTER = r"\([A-Z]\)"
WORDS = "[a-z ]+"
_YES = "[yY]es|[nN]o"
PATTERNS = {
    "boolean_expressions": "[tT]rue|[fF]alse",
    "causal_judgement": _YES,
    "dyck_languages": r"[\]\)\}\> ]+",
    "formal_fallacies": "[iI]nvalid|[vV]alid",
    "multistep_arithmetic_two": r"-?\d+",
    "navigate": _YES,
    "object_counting": r"\d+",
    "sports_understanding": _YES,
    "web_of_lies": _YES,
    "word_sorting": WORDS,
}
"""What an answer looks like; of the tasks that are missing here, a capital in parentheses."""

_ORDER = "A logical deduction task which requires deducing the order of a sequence of objects."
_SWAPS = (
    "A task requiring determining the final positions of a set of objects given their initial positions and a "
    "description of a sequence of swaps."
)
_SARCASM = (
    "Determine which of two sentences is sarcastic.\n\n"
    'According to Cambridge University Dictionary, sarcasm is "the use of remarks that clearly mean the opposite of '
    "what they say, made in order to hurt someone's feelings or to criticize something in a humorous way.\" Sarcastic "
    "sentences often contain satirical or ironic utterances, hyperboles, ambivalent or witty remarks."
)
DESCRIPTIONS = {
    "boolean_expressions": "Evaluate the result of a random Boolean expression.",
    "causal_judgement": "Answer questions about causal attribution.",
    "date_understanding": "Infer the date from context.",
    "disambiguation_qa": "Clarify the meaning of sentences with ambiguous pronouns.",
    "dyck_languages": "Correctly close a Dyck-n word.",
    "formal_fallacies": "Distinguish deductively valid arguments from formal fallacies.",
    "geometric_shapes": "Name geometric shapes from their SVG paths.",
    "hyperbaton": "Order adjectives correctly in English sentences.",
    "logical_deduction_five_objects": _ORDER,
    "logical_deduction_seven_objects": _ORDER,
    "logical_deduction_three_objects": _ORDER,
    "movie_recommendation": "Recommend movies similar to the given list of movies.",
    "multistep_arithmetic_two": "Solve multi-step arithmetic problems.",
    "navigate": (
        "Given a series of navigation instructions, determine whether one would end up back at the starting point."
    ),
    "object_counting": "Questions that involve enumerating objects and asking the model to count them.",
    "penguins_in_a_table": "Answer questions about a table of penguins and their attributes.",
    "reasoning_about_colored_objects": (
        "Answer extremely simple questions about the colors of objects on a surface."
    ),
    "ruin_names": "Select the humorous edit that 'ruins' the input movie or musical artist name.",
    "salient_translation_error_detection": (
        "Detect the type of error in an English translation of a German source sentence."
    ),
    "snarks": _SARCASM,
    "sports_understanding": (
        "Determine whether an artificially constructed sentence relating to sports is plausible or not."
    ),
    "temporal_sequences": (
        "Task description: Answer questions about which times certain events could have occurred."
    ),
    "tracking_shuffled_objects_five_objects": _SWAPS,
    "tracking_shuffled_objects_seven_objects": _SWAPS,
    "tracking_shuffled_objects_three_objects": _SWAPS,
    "web_of_lies": "Evaluate a random boolean function expressed as a word problem.",
    "word_sorting": "Sort a list of words.",
}


@dataclass(frozen=True, slots=True)
class Bbh:
    """BIG-Bench Hard under olmo3-adapt.

    A mark's score is the exact match; its details are `exact_match`. The total is the mean over all examples
    (Σ score·n / Σ n over the tasks, which are the domains).
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "bbh"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub, one configuration per task."""
        return tuple(HubSource("lukaemon/bbh", "test", config=task, domain=task) for task in DESCRIPTIONS)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: task, input, target.

        Raises:
            DataError: a field is missing or of the wrong type, or the task is none of the 27.
        """
        seen: Counter[str] = Counter()
        examples = []
        for where, record in records:
            task = text_field(record, "task", where)
            if task not in DESCRIPTIONS:
                raise DataError(
                    f"{where}: field 'task' is {task!r}; it must be one of {listed(DESCRIPTIONS)}"
                )
            fields = {
                "input": text_field(record, "input", where),
                "gold": text_field(record, "target", where),
            }
            examples.append(Example(f"{task}-{seen[task]}", task, fields))
            seen[task] += 1
        return examples

    def ask(self, example: Example) -> Ask:
        """The task in a sentence, the question and the cue."""
        user = f"{DESCRIPTIONS[example.domain]}\n\nQ: {example.fields['input']}\nA: Let's think step by step."
        return question(user, self.settings, overrides=True)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if the answer is the right one."""
        text = scored_text(answers[0].text or "", self.settings, strips=False)
        found = extract(text, example.domain, bare=BARE_LETTER not in self.settings.quirks)
        exact = example.domain == "dyck_languages"
        right = float(same(found, example.fields["gold"], punctuation=exact))
        return examined(
            self.name, example, answers[0], found, right, {"exact_match": right}, parsed=found != ""
        )


def extract(text: str, task: str, *, bare: bool) -> str:
    """The answer to a task, trimmed; a letter in parentheses. "" if there is none.

    The first pattern that occurs decides by its last match, even if only white space is in it. (The protocol then takes
    off wrappings such as ** and quotes, which none of its patterns lets in.)

    Args:
        text: what is scored.
        task: of the 27.
        bare: whether a letter without parentheses may count.
    """
    text = squeeze(text)
    found = next(
        (found for finder in _finders(task, bare) if (found := finder(text)) is not None), ""
    ).strip()
    return f"({found})" if len(found) == 1 and task not in PATTERNS else found


@cache
def _finders(task: str, bare: bool) -> tuple[Finder, ...]:
    pattern = PATTERNS.get(task, LETTER)
    finders = [last(re.compile(t.replace("X", pattern), re.IGNORECASE)) for t in TEMPLATES]
    if pattern == WORDS:
        finders[IS_CORRECT] = _words_before_is_correct
    finders.append(last(re.compile(f"({pattern})", re.IGNORECASE)))
    if bare and pattern == LETTER:
        finders.append(last(re.compile(r"\b([A-Z])\b")))
    return tuple(finders)


def _words_before_is_correct(text: str) -> str | None:
    r"""The last match of `\b([a-z ]+)\)?\s+is\s+correct`, in time linear in the text.

    Left to the pattern, a text of n words takes n² steps: each word could begin the answer. Here the phrases are found
    first, and of each run of letters and blanks that reaches one, all up to the last that it reaches is the answer.
    """
    phrases = [(_words_end(hit), hit.end()) for hit in _IS_CORRECT.finditer(text)]
    found, least, i = None, 0, 0
    while i < len(phrases):
        end = phrases[i][0]
        start = end
        while start > least and (text[start - 1] == " " or _is_letter(text[start - 1])):
            start -= 1
        edge = _EDGE.search(text, start)
        if edge is not None and edge.start() < end:
            reach = end
            while reach < len(text) and (text[reach] == " " or _is_letter(text[reach])):
                reach += 1
            while i + 1 < len(phrases) and phrases[i + 1][0] <= reach:
                i += 1
            found, least = text[edge.start() : phrases[i][0]], phrases[i][1]
        i += 1
    return found


_IS_CORRECT = re.compile(r"\)?(\s+)is\s+correct", re.IGNORECASE)
_EDGE = re.compile(r"\b")


def _words_end(hit: re.Match[str]) -> int:
    """Where the words before "is correct" end: they take the blanks but one."""
    if hit[0].startswith(")"):
        return hit.start()
    space = hit[1]
    return hit.start() + min(len(space) - len(space.lstrip(" ")), len(space) - 1)


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()

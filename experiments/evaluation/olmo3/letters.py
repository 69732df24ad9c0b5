"""What the multiple-choice tasks of olmo3-adapt share: the sentences that ask for a letter, and marking one."""

from __future__ import annotations

from collections.abc import Sequence

from racelab.experiments.evaluation.olmo3.common import TaskSettings, examined, scored_text
from racelab.experiments.evaluation.olmo3.extract import extract_letter, same
from racelab.experiments.evaluation.types import Answer, Examined, Example

ARTICLE = "article-a"
_PHRASE = '"Therefore, the answer is (ANSWER_LETTER)" where (ANSWER_LETTER) is one of '


def with_sentences(query: str, choices: str) -> str:
    """A question between the two sentences that ask for the closing phrase.

    Args:
        query: question and options.
        choices: as they are told to the model: "(A), (B), (C), (D)".
    """
    return (
        "Answer the following multiple-choice question by giving the correct answer letter in parentheses. "
        f"Provide CONCISE reasoning for the answer, and make sure to finish the response with {_PHRASE}{choices}."
        f"\n\n{query}\n\n"
        f"Answer the above question and REMEMBER to finish your response with the exact phrase {_PHRASE}{choices}."
    )


def mark_letter(
    label: str,
    example: Example,
    answers: Sequence[Answer],
    settings: TaskSettings,
    *,
    letters: str,
    exact: bool,
) -> Examined:
    """1 if the letter is the right one (`fields["gold"]`); the thinking is left out.

    Args:
        label: of the mark.
        example: see there.
        answers: the one.
        settings: of the run.
        letters: a range such as `A-D`.
        exact: whether the closing phrase was asked for as `with_sentences` does.
    """
    text = scored_text(answers[0].text or "", settings, strips=True)
    found = extract_letter(text, letters, exact=exact, article=ARTICLE in settings.quirks)
    right = float(same(found.answer, example.fields["gold"], punctuation=False))
    details = {"exact_match": right, "format": found.form}
    return examined(label, example, answers[0], found.answer, right, details, parsed=found.answer != "")

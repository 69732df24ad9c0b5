"""What a prompt shows of an episode: `{trajectory_summary}` and `{sub_tasks_section}` of RLDS App. E.

The paper does not publish how its placeholders are filled; the form here is ours. Steps are numbered from 0, since
`pivot_step` and `retry_from_step` are turns counted from 0. A text that came from an agent or an environment is made
harmless first (`harmless`), and one that is too long loses its middle, never a step's heading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from racelab.experiments.episodes import Episode, Subtask
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.text import defang
from racelab.experiments.ports import LanguageModel

CUT = " [... cut ...] "
"""Stands where a text lost its middle."""

_LEAST_TOKENS = 8  # a text is never cut to less; a trajectory that needs it is too long
_LEAST_CHARS = len(CUT) + 2
_SLACK = 8  # tokens: a text's last token and the template's next one may be split another way together
_SHRINK = 0.97
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# Special tokens that are not spelt <|...|>: Llama 2, Gemma, Mistral, DeepSeek.
_SPECIAL = re.compile(
    r"<(?=/?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn)>|[｜][^<>]{0,60}[｜]>)|\[(?=/?INST\])"
)


def harmless(text: str) -> str:
    """The text without anything that a tokenizer takes for a special token or cannot encode.

    Spellings of special tokens are broken up (`<|im_end|>`, `</s>`, `<end_of_turn>`, ...), control characters become
    spaces, and lone surrogates, which JSON escapes can produce, question marks. Harmless text stays as it is.
    """
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    return _SPECIAL.sub(lambda found: f"{found[0]} ", defang(_CONTROL.sub(" ", text)))


def cut_middle(text: str, chars: int) -> str:
    """The text if it has at most `chars` characters; otherwise its two ends around `CUT`, `chars` in all.

    Args:
        text: any.
        chars: less than `len(CUT) + 2` counts as that.
    """
    chars = max(chars, _LEAST_CHARS)
    if len(text) <= chars:
        return text
    tail = (chars - len(CUT)) // 2
    return text[: chars - len(CUT) - tail] + CUT + text[-tail:]


def sub_tasks_section(subtasks: Sequence[Subtask]) -> str:
    """A numbered list, `1. name: description` (RLDS App. E)."""
    return "\n".join(f"{k}. {s.name}: {s.description}" for k, s in enumerate(subtasks, 1))


def trajectory_summary(model: LanguageModel, episode: Episode, budget: int) -> str | None:
    """First observation, then for every turn its number, the reply and the observation, the terminal one included.

    If that is more than `budget` tokens, the longest texts lose their middles, as much as needed and all down to the
    same number of tokens.

    Args:
        model: whose tokens are counted.
        episode: any.
        budget: tokens.

    Returns:
        At most `budget` tokens (counted on their own), or None if the headings leave no room for the texts.
    """
    texts = [harmless(episode.first_observation).strip()]
    for turn in episode.turns:
        texts += (harmless(turn.text).strip(), harmless(turn.observation).strip())
    whole = _render(texts)
    total = len(model.encode(whole))
    if total <= budget:
        return whole
    sizes = [len(model.encode(text)) for text in texts]
    frame = max(total - sum(sizes), 0)
    room = budget - frame
    while (level := _water_level(sizes, room)) >= _LEAST_TOKENS:
        summary = _render(
            [
                text if size <= level else cut_middle(text, len(text) * level // size)
                for text, size in zip(texts, sizes, strict=True)
            ]
        )
        used = len(model.encode(summary))
        if used <= budget:
            return summary
        # The ends of a text can have more tokens per character than its middle: try again with less.
        room = int(room * min((budget - frame) / (used - frame), _SHRINK))
    return None


def room_for(model: LanguageModel, template: RoleTemplate, max_tokens: int, **fields: str) -> int:
    """Tokens of the window that are left for a trajectory; may be negative.

    Args:
        model: whose window counts.
        template: with the slot `trajectory_summary`.
        max_tokens: kept free for the reply.
        fields: of the template's other slots.
    """
    bare = len(template.encode(model, trajectory_summary="", **fields))
    return model.window - max_tokens - bare - _SLACK


def fitted_prompt(
    model: LanguageModel, template: RoleTemplate, episode: Episode, max_tokens: int, **fields: str
) -> tuple[int, ...] | None:
    """Ids of the prompt with as much of the trajectory as the window holds beside `max_tokens` of reply.

    Args:
        model: encodes.
        template: with the slot `trajectory_summary`.
        episode: what is shown.
        max_tokens: of the reply.
        fields: of the template's other slots, harmless.

    Returns:
        At most `window - max_tokens` ids, or None if the prompt cannot be made to fit.
    """
    summary = trajectory_summary(model, episode, room_for(model, template, max_tokens, **fields))
    if summary is None:
        return None
    prompt = template.encode(model, trajectory_summary=summary, **fields)
    return prompt if len(prompt) + max_tokens <= model.window else None


def _render(texts: Sequence[str]) -> str:
    """`texts`: first observation, then reply and observation in turns."""
    parts = [f"Initial observation:\n{texts[0] or '(empty)'}"]
    for step, (reply, seen) in enumerate(zip(texts[1::2], texts[2::2], strict=True)):
        parts.append(f"### Step {step}\nAgent:\n{reply or '(empty)'}\nEnvironment:\n{seen or '(empty)'}")
    return "\n\n".join(parts)


def _water_level(sizes: Sequence[int], room: int) -> int:
    """Largest level, up to the largest size, with sum_i min(size_i, level) <= room; negative where room is."""
    for done, size in enumerate(ordered := sorted(sizes)):
        level = room // (len(ordered) - done)
        if level < size:
            return level
        room -= size
    return ordered[-1]

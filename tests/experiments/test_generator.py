"""The two roles of one model, on a scripted language model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.models.generator import (
    Generator,
    GeneratorSettings,
    SamplingSettings,
    Templates,
    default_templates,
)
from racelab.experiments.models.prompts import TEMPLATES, RoleTemplate, get_template
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import Prompt, Sample

RUBRIC = " Names the city | 5\n- Is short | 2\n\n"
PROMPTS = [Prompt("a", "Name a city."), Prompt("b", "Name a river.")]


class ScriptedModel:
    """One token per character; replies depend on the prefix and are numbered."""

    eos_id = 0
    window = 1000

    def __init__(self):
        self.batches = []

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def chat(self, user, system=None):
        return self.encode(f"[{system}]{user}>")

    def generate(self, requests, rng):
        self.batches.append(list(requests))
        return [[self._reply(r, i) for i in range(r.n)] for r in requests]

    def _reply(self, request, i):
        asked = self.decode(request.prefix)
        text = (
            f"answer {i} to {asked}" if asked.endswith(">") else (RUBRIC if "city" in asked else "no rubric")
        )
        return Sample(tuple(self.encode(text)), (-1.0,) * len(text), text, True)

    def logprobs(self, groups, temperature=1.0):
        return [[np.full(len(t), -1.0) for t in tails] for _, tails in groups]


@pytest.fixture
def model():
    return ScriptedModel()


@pytest.fixture
def generator(model):
    return Generator(
        model,
        templates=default_templates("lines"),
        settings=GeneratorSettings(
            SamplingSettings(24, 1.0),
            SamplingSettings(40, 0.7, 0.9),
            RubricSettings(format="lines"),
        ),
    )


def test_the_fake_is_a_language_model(model):
    assert isinstance(model, LanguageModel)


def test_rollouts_are_decoded_in_one_batch(model, generator):
    first, second = generator.rollouts(PROMPTS, 3, torch.Generator())
    assert len(model.batches) == 1
    assert [(r.n, r.max_tokens, r.temperature, r.top_p, r.stop) for r in model.batches[0]] == [
        (3, 24, 1.0, 1.0, ()),
        (3, 24, 1.0, 1.0, ()),
        (1, 40, 0.7, 0.9, ("\n\n", "\nTask:")),
        (1, 40, 0.7, 0.9, ("\n\n", "\nTask:")),
    ]
    assert [s.text for s in first.responses] == [f"answer {i} to [None]Name a city.>" for i in range(3)]
    assert [c.text for c in first.rubric.criteria] == ["Names the city", "Is short"]
    sample, rubric, responses = second
    assert (sample.text, rubric, len(responses)) == ("no rubric", None, 3)


def test_rubrics_are_n_candidates_a_prompt(model, generator):
    groups = generator.rubrics(PROMPTS, 4, torch.Generator())
    assert [len(g) for g in groups] == [4, 4]
    assert [c.rubric is None for c in groups[0] + groups[1]] == [False] * 4 + [True] * 4
    assert [r.n for r in model.batches[0]] == [4, 4]


def test_responses_ask_for_no_rubric(model, generator):
    assert [len(g) for g in generator.responses(PROMPTS, 2, torch.Generator())] == [2, 2]
    assert len(model.batches[0]) == 2


def test_nothing_asked_is_nothing_generated(model, generator):
    rng = torch.Generator()
    assert (
        generator.rollouts([], 2, rng),
        generator.rubrics([], 2, rng),
        generator.responses([], 2, rng),
    ) == ([], [], [])
    assert model.batches == []


def test_prefixes_are_those_of_the_requests(model, generator):
    generator.rollouts(PROMPTS[:1], 2, torch.Generator())
    assert generator.response_prefix(PROMPTS[0]) == model.batches[0][0].prefix
    assert generator.rubric_prefix(PROMPTS[0]) == model.batches[0][1].prefix
    assert model.decode(generator.rubric_prefix(PROMPTS[0])).endswith("Task: Name a city.\nRubric:\n-")


def test_a_prompt_cannot_write_special_tokens(model, generator):
    prefix = model.decode(generator.response_prefix(Prompt("x", "a<|im_end|>b")))
    assert prefix == "[None]a< |im_end| >b>"


def test_a_prompt_beyond_the_window_is_named(generator):
    with pytest.raises(DataError, match=r"prompt long: .*window of 1000; lower data.max_prompt_tokens"):
        generator.response_prefix(Prompt("long", "x" * 975))


@pytest.mark.parametrize("role", ["response", "rubric"])
def test_an_answer_that_leaves_no_room_for_a_prompt_is_named_by_its_key(model, role):
    """The window is 1000; the prompt is not to blame, however short it is."""
    long, short = SamplingSettings(1000), SamplingSettings(5)
    parts = {"response": short, "rubric": short, role: long}
    full = Generator(model, templates=default_templates("lines"), settings=GeneratorSettings(**parts))
    with pytest.raises(
        ConfigError, match=rf"method\.{role}\.max_tokens=1000: .*window of 1000; take less than"
    ):
        getattr(full, f"{role}_prefix")(Prompt("empty", ""))


def test_parse_gives_the_reason(generator):
    assert generator.parse("nothing", PROMPTS[0]).reason == "no_criteria"


def test_templates_need_the_prompt_slot(model):
    bad = Templates(get_template("policy-chat"), get_template("judge-json"))
    with pytest.raises(ConfigError, match="judge-json"):
        Generator(model, templates=bad, settings=GeneratorSettings(SamplingSettings(1), SamplingSettings(1)))


def test_render_fills_exactly_the_slots_and_leaves_other_braces():
    template = RoleTemplate(name="t", version=1, user='{prompt} {"score": <n>} {high}')
    assert template.render(prompt="{high}", high="9") == '{high} {"score": <n>} 9'
    for fields in ({"prompt": "x"}, {"prompt": "x", "high": "1", "low": "0"}):
        with pytest.raises(ConfigError, match="has the slots"):
            template.render(**fields)


def test_shipped_templates_have_their_slots_and_unknown_names_are_errors():
    assert {name: sorted(t.slots) for name, t in TEMPLATES.items()} == {
        "policy-chat": ["prompt"],
        "rubric-lines": ["prompt"],
        "rubric-json": ["prompt"],
        "judge-likelihood": ["criteria", "prompt"],
        "judge-digit": ["criteria", "high", "low", "prompt", "response"],
        "judge-json": ["criteria", "high", "prompt", "response"],
    }
    with pytest.raises(ConfigError, match="no template named 'x'"):
        get_template("x")
    with pytest.raises(ConfigError, match="'yaml' is unknown"):
        default_templates("yaml")


def test_the_few_shot_examples_are_those_in_the_text():
    lines = get_template("rubric-lines")
    assert lines.examples
    assert all(f"- {e} | " in lines.user for e in lines.examples)


def test_sha_changes_with_the_wording():
    one, two = (RoleTemplate(name="t", version=1, user=u) for u in ("{prompt}", "{prompt} "))
    assert one.sha != two.sha

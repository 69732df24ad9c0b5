"""What the rubric suite finds, refuses and opens, on tiny models."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.evaluation.preference import open as opening
from racelab.experiments.evaluation.preference.open import (
    find_inputs,
    find_rater,
    make_rated,
    open_judge,
    open_rated,
    stored_scales,
    training_config,
    writing,
)
from racelab.experiments.evaluation.subject.find import find_subject
from racelab.experiments.evaluation.subject.found import Found, Trained
from racelab.experiments.models.configured import judge_settings
from racelab.experiments.models.judge_likelihood import Calibration, LikelihoodJudge
from racelab.experiments.models.judge_prompted import DigitJudge
from racelab.experiments.runfolder import RunFolder

from ...experiments.api_server import ApiServer, ok
from ...experiments.local_models import SMALL, byte_tokenizer
from ...experiments.tiny_run import write_tiny_model

SCALES = Calibration(-2.0, 0.5, 0.3, 0.1, 96)
TRAINED = ("method.rubric.max_criteria=3", "tracking=none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def packaged(monkeypatch, model):
    """The packaged names stand for the tiny model, so that nothing is converted."""
    real = opening.resolve_model

    def resolve(source, **more):
        return model if source in ("smollm2-135m", "minilm") else real(source, **more)

    monkeypatch.setattr(opening, "resolve_model", resolve)
    return model


@functools.cache
def config(*words):
    return compose(["suite=rubric", "tracking=none", "run.threads=1", *words]).config


def found_at(folder, kind="folder", trained=None):
    engine = "server" if kind == "url" else "local"
    return Found(kind, engine, None if kind == "url" else Path(folder), trained)


def trained(tmp_path, *words, scales=SCALES, said=None):
    """A finished RACE run with stored scales, as a model under test over the packaged model."""
    composed = compose([*TRAINED, *words])
    run = RunFolder.create(tmp_path, "r", composed_yaml=composed.yaml, overrides=[], info={"kind": "train"})
    judge = LikelihoodJudge(
        object(),
        object(),
        settings=judge_settings(composed.race.judge, 0),
        calibration=scales,
        model_id="abc",
    )
    (run.path / "setup.json").write_text(json.dumps({"judge": said or judge.describe()}))
    return Trained(run, 3, "", "fast", 0), judge


@pytest.mark.parametrize("name", ["rewardbench2", "judgebench"])
def test_both_benchmarks_are_made(name):
    assert make_rated(name, config()).name == name


def test_another_benchmark_is_none_that_is_rated():
    with pytest.raises(ConfigError, match="bbh is not rated"):
        make_rated("bbh", config())


def test_the_quirk_of_rewardbench2_reaches_it():
    quirky = make_rated("rewardbench2", config("eval.quirks=[rewardbench2-any-credit]"))
    assert quirky._any_credit
    assert not make_rated("rewardbench2", config())._any_credit


def test_what_cannot_be_honoured_is_refused(model):
    with pytest.raises(ConfigError, match=r"eval\.quirks=judgebench-system-twice"):
        find_rater(config("eval.quirks=[judgebench-system-twice]"), found_at(model))
    with pytest.raises(ConfigError, match="--judge"):
        find_rater(config("subject.source=http://127.0.0.1:9/v1"), found_at("", "url"))
    with pytest.raises(ConfigError, match="scalar head"):
        find_rater(config("eval.rater=reward-model"), found_at("", "url"))


def test_the_untrained_policy_is_the_packaged_model_or_the_runs_base(packaged, tmp_path):
    c = config()
    inputs = find_inputs(c, found_at(tmp_path))
    assert (inputs.name, inputs.policy, inputs.folder) == ("likelihood/smollm2-135m", packaged, None)
    run, _ = trained(tmp_path / "runs", f"model.source={tmp_path}/mine")
    inputs = find_inputs(c, found_at(tmp_path / "mine", "run", run))
    assert (inputs.name, inputs.policy) == ("likelihood/mine", tmp_path / "mine")
    inputs = find_inputs(config("judge=digit", f"judge.source={packaged}"), found_at("", "url"))
    assert (inputs.name, inputs.policy, inputs.folder) == ("digit/model", None, packaged)
    assert inputs.encoder is None


def test_a_server_is_asked_before_anything_is_loaded(model):
    words = ("judge=api", "judge.cache=false")
    with ApiServer(lambda prompt: ok("hi"), models={"org/Judge-8B": {}}) as server:
        c = config(*words, f"judge.base_url={server.url}")
        assert find_rater(c, found_at(model)) == ("judged by api/Judge-8B",)
    with pytest.raises(UnreachableError, match=r"judge\.base_url"):
        find_rater(c, found_at(model))


def test_a_likelihood_judge_of_another_model_is_called_so(packaged, tmp_path):
    other = find_rater(config(), found_at(tmp_path))
    assert (other[0], "judge=qwen3-1.7b names another" in other[1]) == (
        "judged by likelihood/smollm2-135m",
        True,
    )
    assert len(find_rater(config(), found_at(packaged, "packaged"))) == 1
    run, _ = trained(tmp_path / "runs")
    assert len(find_rater(config(), found_at(packaged, "run", run))) == 1
    assert len(find_rater(config("judge=digit", f"judge.source={packaged}"), found_at(tmp_path))) == 1


def test_a_rubric_is_asked_for_as_the_run_was_trained(packaged, tmp_path):
    run, _ = trained(tmp_path)
    found = found_at(packaged, "run", run)
    own = writing(config(), found, training_config(found))
    assert own.template.name == "rubric-lines"
    assert own.parsing.max_criteria == 3
    assert own.parsing.copied == own.template.examples
    assert own.parsing.on_parse_failure == "raw_text"
    assert (own.temperature, own.top_p, own.max_tokens) == (1.0, 0.95, 16384)
    assert own.retry_temperatures == (0.6, 0.3, 0.1)
    other = writing(config("rubric.format=json"), found, training_config(found))
    assert (other.template.name, other.parsing.max_criteria, other.parsing.copied) == ("rubric-json", 12, ())


def test_other_models_write_json_and_the_packaged_one_lines(packaged, tmp_path):
    assert writing(config(), found_at(packaged, "packaged"), None).parsing.max_criteria == 4
    assert writing(config(), found_at(packaged, "packaged"), None).template.name == "rubric-lines"
    for found in (found_at(tmp_path), found_at("", "url")):
        assert writing(config(), found, None).template.name == "rubric-json"
    capped = writing(config("eval.max_tokens=50", "eval.budgets={judgebench: 20}"), found_at(tmp_path), None)
    assert capped.budgets == {"rewardbench2": 50, "judgebench": 20}


def test_a_runs_scales_are_taken_if_its_judge_was_this_one(tmp_path):
    c = config()
    run, judge = trained(tmp_path / "a")
    found = found_at(tmp_path, "run", run)
    bare = LikelihoodJudge(object(), object(), settings=judge_settings(c.judge, 5), model_id="abc")
    assert stored_scales(c, found, bare) == judge.describe()["calibration"]
    other = LikelihoodJudge(object(), object(), settings=judge.settings, model_id="abd")
    assert stored_scales(c, found, other) is None
    slope = config("judge.slope=2")
    changed = LikelihoodJudge(object(), object(), settings=judge_settings(slope.judge, 0), model_id="abc")
    assert stored_scales(slope, found, changed) is None
    assert stored_scales(config("encoder.max_length=64"), found, bare) is None
    assert stored_scales(c, found_at(tmp_path), bare) is None
    (run.run.path / "setup.json").unlink()
    assert stored_scales(c, found, bare) is None
    digit, _ = trained(tmp_path / "b", "judge=digit", said={"kind": "digit"}, scales=None)
    assert stored_scales(c, found_at(tmp_path, "run", digit), bare) is None


def test_the_judge_gets_the_runs_scales(packaged, tmp_path, monkeypatch):
    notes = []
    run, judge = trained(tmp_path)
    monkeypatch.setattr(opening, "model_sha256", lambda folder: "abc")
    monkeypatch.setattr(opening, "_encoder", lambda config, folder: object())
    found = found_at(packaged, "run", run)
    c = config()
    opened = open_judge(c, found, find_inputs(c, found), notes.append)
    assert opened.describe() == judge.describe()
    assert notes == ["the judge's scales are those of the run under test"]


def test_a_digit_judge_needs_no_scales(packaged, tmp_path):
    c = config("judge=digit")
    found = found_at(packaged)
    opened = open_judge(c, found, find_inputs(c, found), pytest.fail)
    assert isinstance(opened, DigitJudge)


def pairs(n):
    return [
        (f"f:{k}", {"pair_id": str(k), "source": "livecodebench", "question": f"Name {k}.",
                    "response_A": "Mars", "response_B": "Pluto", "label": "A>B"})
        for k in range(n)
    ]  # fmt: skip


def test_a_judge_of_the_paper_behind_a_server_is_sampled_and_read_as_judgebench_does(model):
    with ApiServer(lambda prompt: ok("hi"), models={"j": {}}) as server:
        c = config("judge=api-thinking", f"judge.base_url={server.url}")
        opened = open_judge(c, found_at(model), find_inputs(c, found_at(model)), pytest.fail)
    asked = judge_settings(c.judge, 0)
    assert (asked.temperature, asked.top_p, asked.max_tokens, c.judge.timeout_s) == (0.6, 0.95, 16384, 600)
    assert opened.settings == replace(asked, reading="first_number", strict=True)


def test_a_judge_that_is_loaded_here_is_read_as_judgebench_does(packaged):
    c = config("judge=json", f"judge.source={packaged}")
    opened = open_judge(c, found_at(packaged), find_inputs(c, found_at(packaged)), pytest.fail)
    assert opened.settings == replace(judge_settings(c.judge, 0), reading="first_number")


def test_a_local_model_is_rated_under_a_judge_behind_a_server(model, tmp_path):
    """Noise is no rubric, so it is asked for again and then used as it stands; the right answer scores higher."""
    script = {"grade:\nMars": ok('{"score": 90}'), "grade:\nPluto": ok('{"score": 20}')}
    with ApiServer(script) as server:
        c = config(
            f"subject.source={model}", "judge=api", "judge.cache=false", "judge.model=j",
            f"judge.base_url={server.url}", "rubric.max_tokens=5", "rubric.format=lines",
        )  # fmt: skip
        found = find_subject(c, tmp_path)
        bench = make_rated("judgebench", c)
        examples = bench.read(pairs(2))
        with open_rated(c, found, lambda line: None) as make:
            every = list(make(bench, examples).examine(frozenset({"0", "1"})))
            (again,) = make(bench, examples).examine(frozenset({"1"}))
    assert {e.marks[0].score for e in every} == {1.0}
    assert every[0].marks[0].details["games"] == [[0.9, 0.2], [0.9, 0.2]]
    assert every[0].marks[0].judge == "api/j"
    roles = [row["role"] for row in every[0].answers]
    assert len(roles) > 5  # noise is asked for again
    assert (set(roles[:-4]), roles[-4:]) == ({"rubric"}, ["judge"] * 4)
    assert again == next(e for e in every if e.example.example_id == "1")


def test_a_reward_model_is_opened_and_asked_without_a_judge(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1))
    folder = tmp_path / "org" / "rm"
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    c = config(f"subject.source={folder}", "eval.rater=reward-model")
    found = find_subject(c, tmp_path)
    assert find_rater(c, found) == ("rated by the reward model rm",)
    bench = make_rated("judgebench", c)
    with open_rated(c, found, pytest.fail) as make:
        (examined,) = make(bench, bench.read(pairs(1))).examine(frozenset({"0"}))
    (mark,) = examined.marks
    first, second = mark.details["games"]
    assert first == second
    assert np.isfinite(first).all()
    assert (mark.judge, mark.status) == ("reward-model/rm", "scored")
    assert mark.details["decisions"] == [1, 1] if first[0] > first[1] else [-1, -1]


@pytest.mark.slow
def test_fresh_scales_are_those_of_a_training_run(tmp_path):
    """The packaged model, prompts and encoder: the same numbers to the last bit."""
    from racelab.experiments.build import build_parts, calibrated
    from racelab.experiments.build import find_inputs as find_training

    training = compose(["tracking=none", "run.threads=1"]).race
    parts, prompts, _ = build_parts(training, find_training(training, tmp_path))
    c = config()
    found = find_subject(c, tmp_path)
    opened = open_judge(c, found, find_inputs(c, found), lambda line: None)
    assert opened.describe() == calibrated(parts, training, prompts, None).describe()

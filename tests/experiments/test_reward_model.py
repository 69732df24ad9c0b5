"""The scalar reward model: full folders, fitted heads, the fit itself, and the method over it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError, DataError, ModelError
from racelab.experiments.methods.baselines.scalar_rm import ScalarScorer, make_reward_model, scalar_rm
from racelab.experiments.models.reward_fit import (
    FitSettings,
    bradley_terry,
    extract,
    fitted_classifier,
    split,
)
from racelab.experiments.models.reward_model import (
    HEAD_FILE,
    WEIGHTS_FILE,
    ClassifierRewardModel,
    export_classifier,
    new_head,
    open_classifier,
    opened,
)
from racelab.experiments.parts import Parts
from racelab.experiments.ports import RewardModel
from racelab.experiments.rng import Streams
from racelab.experiments.types import FloatArray, Pair, Prompt, Sample, TokenBatch, UpdateStats

from .local_models import FAMILIES, SMALL, byte_tokenizer, write_model

PROMPTS = [Prompt("p0", "Say hi."), Prompt("p1", "What is 3 plus 4?")]
SETTINGS = FitSettings(holdout=0.25, l2=1.0, seed=0, max_length=160)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, path)
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard sequence-classification folder with one label."""
    return write_classifier(tmp_path_factory.mktemp("full"))


def write_classifier(path: Path, labels: int = 1) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(5)
        module: Any = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=labels))
    module.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def sample(text: str) -> Sample:
    return Sample((1,), (-1.0,), text, True)


def groups(*texts: Sequence[str]) -> list[tuple[Sample, ...]]:
    return [tuple(sample(t) for t in group) for group in texts]


def pairs(n: int = 12) -> list[Pair]:
    return [Pair(Prompt(f"q{i}", f"question {i}"), f"yes {i}!", f"no {'x' * (i % 5)}") for i in range(n)]


# ---- scoring ---------------------------------------------------------------------------------------------


def test_a_full_folder_scores_as_transformers_does(full):
    """One conversation at a time, without padding, through the pipeline of the library: sigmoid of its logit."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = ClassifierRewardModel(open_classifier(full, dtype="float32"), max_length=160)
    texts = [["Hi.", "Hello there, <think>hm</think> you", ""], ["It is 7.", "No", "8"]]
    got = model.score(PROMPTS, groups(*texts))
    module: Any = AutoModelForSequenceClassification.from_pretrained(full).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(full)
    for prompt, answers, scores in zip(PROMPTS, texts, got, strict=True):
        for answer, score in zip(answers, scores, strict=True):
            turns = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                want = torch.sigmoid(module(input_ids=ids).logits[0, 0]).item()
            assert score == pytest.approx(want, abs=1e-6)
    assert isinstance(model, RewardModel)
    assert np.ptp(np.concatenate(got)) > 0.01


def test_scores_do_not_depend_on_the_rest_of_the_batch(full):
    model = ClassifierRewardModel(open_classifier(full, dtype="float32"), max_length=160)
    together = model.score(PROMPTS, groups(["Hi.", "a" * 60], ["b"]))
    alone = model.score(PROMPTS[:1], groups(["Hi."]))
    assert together[0][0] == pytest.approx(alone[0][0], abs=1e-6)
    assert [len(s) for s in together] == [2, 1]
    assert model.score([], []) == []


def test_what_is_too_long_has_no_score(full):
    model = ClassifierRewardModel(open_classifier(full, dtype="float32"), max_length=50)
    n = len(model.classifier.tokens(PROMPTS[0].text, "Hi."))
    for limit, scored in ((n, True), (n - 1, False)):
        short = ClassifierRewardModel(model.classifier, max_length=limit)
        (scores,) = short.score(PROMPTS[:1], groups(["Hi.", "x" * 100]))
        assert math.isfinite(scores[0]) is scored
        assert math.isnan(scores[1])
    assert ClassifierRewardModel(model.classifier, max_length=9999).max_length == 160  # the model's window


def test_a_missing_padding_token_is_replaced(full, tmp_path):
    """Neither config nor tokenizer names one: the end token pads, and the scores are the same."""
    import shutil

    path = tmp_path / "nopad"
    shutil.copytree(full, path)
    for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        body = json.loads((path / name).read_text())
        body.pop(key, None)
        (path / name).write_text(json.dumps(body))
    special = path / "special_tokens_map.json"
    special.unlink(missing_ok=True)
    found = open_classifier(path, dtype="float32")
    assert found.tokenizer.pad_token == "<eos>"
    assert found.module.config.pad_token_id == found.tokenizer.pad_token_id == 257
    texts = groups(["Hi.", "much longer than that"], ["a"])
    got = ClassifierRewardModel(found, max_length=160).score(PROMPTS, texts)
    want = ClassifierRewardModel(open_classifier(full, dtype="float32"), max_length=160).score(PROMPTS, texts)
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), atol=1e-6)


def test_no_chat_template_and_special_tokens_in_texts(full):
    found = open_classifier(full, dtype="float32")
    assert "< |im_end| >" in found.tokenizer.decode(found.tokens("a", "b <|im_end|>"))
    found.tokenizer.chat_template = None
    assert found.tokenizer.decode(found.tokens("a", "b")) == "a\n\nb<eos>"


def test_bf16_is_near(full):
    low, high = (
        ClassifierRewardModel(open_classifier(full, dtype=d), max_length=160).score(
            PROMPTS[:1], groups(["Hi.", "ho"])
        )
        for d in ("bfloat16", "float32")  # type: ignore[arg-type]
    )
    np.testing.assert_allclose(low[0], high[0], atol=0.02)


def test_descriptions_tell_models_apart(full, base, tmp_path):
    found = ClassifierRewardModel(open_classifier(full, dtype="float32"), max_length=60).describe()
    assert found["max_length"] == 60
    assert found["dtype"] == "float32"
    heads = [
        fitted_classifier(tmp_path / str(k), base, pairs(k), SETTINGS, source=str(base), dtype="float32")[0]
        for k in (6, 8)
    ]
    assert len({found["sha256"], *(h.sha256 for h in heads)}) == 3


def test_folders_that_are_no_reward_model(tmp_path, base):
    with pytest.raises(ModelError, match="2 labels"):
        open_classifier(write_classifier(tmp_path / "two", labels=2))
    with pytest.raises(ModelError, match=r"score\.weight is missing"):
        open_classifier(base)
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_classifier(tmp_path / "nowhere")


# ---- the fit ---------------------------------------------------------------------------------------------


def test_one_pair_by_hand():
    """Features (1, 0) and (-1, 0): deviation 1, mean 0, z = (2, 0). With l2 = 2 the slope of
    log(1 + exp(-2w)) + w² is 2w - 2/(1 + e^(2w)): 0 where w (1 + e^(2w)) = 1, which is at w = 0.33742...
    """
    w = bradley_terry(np.array([[[1.0, 0.0], [-1.0, 0.0]]]), 2.0)
    assert w == pytest.approx([0.337415807171, 0.0], abs=1e-9)


def test_a_lone_feature_with_a_level_cannot_be_used():
    """(2, 1) against (0, 1): the second is constant; the first has mean 1, and w may not lie along the mean."""
    np.testing.assert_allclose(
        bradley_terry(np.array([[[2.0, 1.0], [0.0, 1.0]]]), 1.0), [0.0, 0.0], atol=1e-15
    )


def loss(features: FloatArray, w: FloatArray, l2: float) -> float:
    scale = features.reshape(-1, features.shape[-1]).std(axis=0)
    z = features[:, 0] - features[:, 1]
    return float(np.logaddexp(0, -(z @ w)).sum() + 0.5 * l2 * ((w * scale) ** 2).sum())


@given(st.integers(2, 12), st.integers(2, 9), st.sampled_from([0.01, 1.0, 30.0]), st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_the_fit_is_the_minimum_under_its_constraint(n, width, l2, seed):
    """No feasible step lowers the loss; the mean logit of the training answers is 0."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 2, width)) * rng.uniform(0.1, 10, width) + rng.normal(size=width) * 5
    w = bradley_terry(features, l2)
    mean = features.reshape(-1, width).mean(axis=0)
    assert abs(w @ mean) < 1e-8 * max(1.0, float(np.abs(w) @ np.abs(mean)))
    best = loss(features, w, l2)
    for _ in range(20):
        step = rng.normal(size=width) * 1e-2 / features.reshape(-1, width).std(axis=0)
        step -= mean * (step @ mean) / (mean @ mean)
        assert loss(features, w + step, l2) >= best - 1e-9 * max(1.0, best)


@given(st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_scale_and_order_of_pairs_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(8, 2, 5)) + 3.0
    factors = rng.uniform(0.5, 20.0, 5)
    w = bradley_terry(features, 1.0)
    np.testing.assert_allclose(bradley_terry(features * factors, 1.0) * factors, w, atol=1e-7)
    np.testing.assert_allclose(bradley_terry(features[::-1], 1.0), w, atol=1e-7)
    np.testing.assert_allclose(bradley_terry(features[:, ::-1], 1.0), -w, atol=1e-7)


def test_odd_features():
    constant = np.ones((3, 2, 4))
    np.testing.assert_array_equal(bradley_terry(constant, 1.0), np.zeros(4))
    with pytest.raises(ModelError, match="not finite"):
        bradley_terry(np.full((2, 2, 3), np.nan), 1.0)


def test_pairs_of_a_prompt_stay_on_one_side():
    rows = [Pair(Prompt(f"q{i}", f"question {i % 5}"), "a", f"b{i}") for i in range(20)]
    train, held = split(rows, 0.25, seed=3)
    assert sorted(train + held) == list(range(20))
    assert {rows[i].prompt.text for i in train}.isdisjoint(rows[i].prompt.text for i in held)
    assert len(held) == 4  # round(0.25 x 5) = 1 prompt with its 4 pairs
    assert split(rows, 0.25, seed=3) == (train, held)
    assert any(split(rows, 0.25, seed=s) != (train, held) for s in range(4, 9))
    assert [len(x) for x in split(rows, 0.99, seed=0)] == [4, 16]
    with pytest.raises(DataError, match="two at least"):
        split(rows[:1], 0.5, seed=0)


def test_features_are_what_the_head_sees(base):
    classifier = opened(base, *new_head(base, "float32"), "cpu")
    weight = torch.linspace(-1, 1, classifier.module.score.in_features)
    classifier.module.score.weight.data.copy_(weight)
    rows = [classifier.tokens("q", a) for a in ("short", "a longer answer", "short")]
    features = extract(classifier, rows)
    model = ClassifierRewardModel(classifier, max_length=160)
    (scores,) = model.score([Prompt("p", "q")], groups(["short", "a longer answer", "short"]))
    logits = features @ weight.double().numpy()
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores, atol=1e-5)
    np.testing.assert_allclose(features[0], features[2], atol=1e-5)


def test_a_fitted_head_ranks_its_pairs_and_is_read_back(base, tmp_path):
    folder = tmp_path / "reward_model"
    first, report = fitted_classifier(folder, base, pairs(), SETTINGS, source=str(base), dtype="float32")
    assert (report.train_pairs, report.heldout_pairs, report.left_out) == (9, 3, 0)
    assert report.train_accuracy == 1.0
    assert 0.0 <= report.heldout_accuracy <= 1.0
    assert "held-out" in report.line()
    assert sorted(p.name for p in folder.iterdir()) == [WEIGHTS_FILE, HEAD_FILE]
    assert sum(p.stat().st_size for p in folder.iterdir()) < 5_000
    stamp = (folder / WEIGHTS_FILE).stat().st_mtime_ns
    # a resumed run takes what is there
    again, same = fitted_classifier(folder, base, pairs(4), SETTINGS, source=str(base), dtype="float32")
    assert same == report
    assert (folder / WEIGHTS_FILE).stat().st_mtime_ns == stamp
    texts = groups(["yes 0!", "no"], ["x"])
    one, two = (ClassifierRewardModel(c, max_length=160).score(PROMPTS, texts) for c in (first, again))
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(two))
    train, _ = split(pairs(), 0.25, 0)
    model = ClassifierRewardModel(first, max_length=160)
    scores = [model.score([p.prompt], groups([p.chosen, p.rejected]))[0] for p in pairs()]
    assert all(scores[i][0] > scores[i][1] for i in train)
    level = np.mean([scores[i] for i in train])
    assert 0.2 < level < 0.8  # the sigmoid is not saturated


def test_the_same_pairs_give_the_same_head(base, tmp_path):
    for name in ("a", "b"):
        fitted_classifier(tmp_path / name, base, pairs(), SETTINGS, source=str(base), dtype="float32")
    assert (tmp_path / "a" / WEIGHTS_FILE).read_bytes() == (tmp_path / "b" / WEIGHTS_FILE).read_bytes()


def test_an_exported_head_is_a_standard_folder(base, tmp_path):
    from transformers import AutoModelForSequenceClassification

    head, _ = fitted_classifier(tmp_path / "h", base, pairs(), SETTINGS, source=str(base), dtype="float32")
    out = export_classifier(head, tmp_path / "full")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert config["pad_token_id"] == head.tokenizer.pad_token_id
    module: Any = AutoModelForSequenceClassification.from_pretrained(out)
    assert module.config.num_labels == 1
    assert torch.equal(module.score.weight, head.module.score.weight)
    texts = groups(["yes", "no way"], ["x"])
    one, two = (
        ClassifierRewardModel(c, max_length=160).score(PROMPTS, texts)
        for c in (head, open_classifier(out, dtype="float32"))
    )
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(two))
    with pytest.raises(ModelError, match="already holds weights"):
        export_classifier(head, out)


def test_a_head_without_its_model_is_refused(tmp_path):
    first, other = tmp_path / "llama", tmp_path / "qwen2"
    write_model("llama", first)
    write_model("qwen2", other)
    folder = tmp_path / "head"
    fitted_classifier(folder, first, pairs(), SETTINGS, source=str(first), dtype="float32")
    assert open_classifier(folder, dtype="float32").sha256  # found by its name
    with pytest.raises(ModelError, match="other weights"):
        open_classifier(folder, base=other)
    (folder / WEIGHTS_FILE).write_bytes(b"no")
    with pytest.raises(ModelError, match="remove the folder"):
        open_classifier(folder, dtype="float32")


def test_pairs_beyond_the_length_are_left_out_and_counted(base, tmp_path):
    rows = [*pairs(), Pair(Prompt("long", "x" * 150), "a", "b")]
    _, report = fitted_classifier(tmp_path / "h", base, rows, SETTINGS, source=str(base), dtype="float32")
    assert report.left_out == 1
    assert "1 too long" in report.line()


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families_take_a_head(family, tmp_path):
    assert family in FAMILIES
    write_model(family, tmp_path / "base")
    _, report = fitted_classifier(
        tmp_path / "h", tmp_path / "base", pairs(), SETTINGS, source=str(tmp_path / "base"), dtype="bfloat16"
    )
    assert report.train_accuracy > 0.8


# ---- the method ------------------------------------------------------------------------------------------


class Scores:
    """A reward model from a list; NaN where the list says so."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = list(rows)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> list[FloatArray]:
        return [np.array(self.rows.pop(0), dtype=float) for _ in prompts]

    def describe(self) -> dict[str, object]:
        return {}


class World:
    """The rest of the parts."""

    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []
        self.taken = 0

    def take(self, n: int) -> list[Prompt]:
        self.taken += n
        return [Prompt(f"p{self.taken - n + i}", "prompt") for i in range(n)]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[tuple[Sample, ...]]:
        return [tuple(sample(f"answer {i}{i} is {i}") for i in range(n)) for _ in prompts]

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (7, int(prompt.prompt_id[1:]))

    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        return UpdateStats(bool(batch.groups), n_samples=batch.n_samples, n_tokens=batch.n_tokens)

    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(8)[[i % 8 for i in range(len(texts))]]


def method(rows: Sequence[Sequence[float]] | None, *overrides: str) -> tuple[World, Any]:
    words = ["method=scalar-rm", "method.group_size=4", "method.prompts_per_step=2", *overrides]
    config: Any = compose(words).config.method
    world: Any = World()
    model = None if rows is None else Scores(rows)
    parts = Parts(world, world, world, world, world, world, Streams(0), reward_model=model)
    return world, scalar_rm(config, parts, policy_updates=3, max_steps=None)


def test_a_policy_update_costs_g_scores_a_prompt_and_no_rubric():
    """Group 1: 0.2 and 0.8 twice each: mean 1/2, std 3/10, advantages -1 and 1; the missing one of group 2 gets 0."""
    nan = math.nan
    world, scalar = method([(0.2, 0.8, 0.2, 0.8), (0.1, nan, 0.5, 0.3)])
    state, record = scalar.step(scalar.start())
    first, second = world.batches[0].groups
    assert [float(s.advantages[0]) for s in first.samples] == pytest.approx([-1, 1, -1, 1], abs=1e-6)
    assert float(second.samples[1].advantages[0]) == 0.0
    costs = {k.split("/")[-1]: v for k, v in record.metrics.items() if k.startswith("cost/")}
    for kind, n in {"policy_gen": 8, "rubric_gen": 0, "judge_eval": 8, "learner_samples": 8}.items():
        assert costs[kind] == costs[f"{kind}_expected"] == costs[f"{kind}_printed"] == n
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["health/rubric_parse_fail"] == 0.0
    assert record.metrics["health/judge_infra_fail"] == 1.0
    assert [r["rubric_sha"] for r in record.tables["groups"]] == [None, None]
    assert state.step == 1
    assert not scalar.done(state)


def test_it_needs_a_reward_model():
    with pytest.raises(ConfigError, match=r"method\.source"):
        method(None)


def test_the_state_goes_on_after_json():
    rows = [(0.2, 0.8, 0.2, 0.8)] * 8
    world, scalar = method(rows)
    again_world, again = method(rows)
    state, _ = scalar.step(scalar.start())
    again_world.taken = world.taken
    loaded = again.load(json.loads(json.dumps(state.state())))
    assert loaded == state
    _, record = scalar.step(state)
    _, record_again = again.step(loaded)
    assert record_again.tables == record.tables


@pytest.mark.parametrize("fitted", [True, False])
def test_making_what_the_config_names(fitted, full, tmp_path):
    base = tmp_path / "base"
    write_model("llama", base)
    config: Any = compose(["method=scalar-rm", f"model.source={base}"]).config
    found, lines = make_reward_model(
        config.method,
        config.model,
        found=None if fitted else full,
        base=base,
        pairs=pairs(),
        folder=tmp_path / "run",
        seed=0,
        device="cpu",
    )
    assert (tmp_path / "run").exists() is fitted
    assert len(lines) == fitted
    scored = ScalarScorer(found).score(PROMPTS, groups(["a", "b"], ["c", "d"]))
    assert all(((r >= 0) & (r <= 1)).all() for r in scored.rewards)

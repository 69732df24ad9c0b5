"""Generation: sampling distribution, nucleus, stops, limits, retirement, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from racelab.experiments.backends.local import cache, decode
from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.backends.local.sampling import choose
from racelab.experiments.errors import DataError
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import GenerationRequest

from .local_models import write_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder)
    return open_language_model(folder, role="frozen", compute_dtype="float32")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(logits: torch.Tensor, temperature: float, top_p: float, n: int) -> torch.Tensor:
    rows = logits.expand(n, -1).clone()
    u = torch.rand(n, generator=rng(5), dtype=torch.float64)
    return choose(rows, torch.full((n,), temperature), torch.full((n,), top_p), u)[0]


@pytest.mark.parametrize("vocab", [5, 128, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_distribution(vocab: int, temperature: float) -> None:
    """Chi-square of 20,000 draws stays under its mean plus five standard deviations: df + 5 sqrt(2 df)."""
    logits = torch.randn(vocab, generator=rng(1))
    n = 20_000
    count = torch.bincount(draws(logits, temperature, 1.0, n), minlength=vocab).double()
    want = torch.softmax(logits.double() / temperature, -1) * n
    chi = float(((count - want) ** 2 / want).sum())
    assert chi < (vocab - 1) + 5 * (2 * (vocab - 1)) ** 0.5


def test_draws_are_the_inverse_cdf() -> None:
    """p = 1/8, 1/2, 0, 3/8: u below 1/8 gives 0, then 1 up to 5/8, then 3; the token of weight 0 never."""
    logits = torch.tensor([0.125, 0.5, 0.0, 0.375]).log()
    u = torch.tensor([0.0, 0.124, 0.126, 0.624, 0.626, 1 - 2**-53], dtype=torch.float64)
    tokens, logp = choose(logits.expand(6, -1).clone(), torch.ones(6), torch.ones(6), u)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    np.testing.assert_allclose(logp.exp(), [0.125, 0.125, 0.5, 0.5, 0.375, 0.375], rtol=1e-6)


def test_nucleus_keeps_the_smallest_set() -> None:
    """p = 0.5, 0.3, 0.15, 0.05 and top_p 0.7: the first two are kept, as 5/8 and 3/8."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    count = torch.bincount(draws(logits, 1.0, 0.7, 8000), minlength=4)
    assert count[2:].tolist() == [0, 0]
    assert abs(int(count[0]) / 8000 - 5 / 8) < 0.03
    _, logp = choose(logits[None].clone(), torch.ones(1), torch.tensor([0.7]), torch.tensor([0.9]).double())
    assert abs(float(logp.exp()) - 3 / 8) < 1e-6


def test_greedy_row_ignores_draw_and_reports_plain_logprob() -> None:
    logits = torch.tensor([[0.2, 0.7, 0.1]]).log()
    tokens, logp = choose(logits, torch.zeros(1), torch.ones(1), torch.tensor([0.99]).double())
    assert tokens.tolist() == [1]
    assert abs(float(logp.exp()) - 0.7) < 1e-6


def test_implements_the_port(model: LocalModel) -> None:
    assert isinstance(model, LanguageModel)
    assert model.decode(model.encode("héllo <eos>")) == "héllo "
    assert model.encode("<eos>") == [model.eos_id]
    assert model.decode(model.chat("hi", "sys")) == "system:sysuser:hia:"


def test_same_generator_state_same_samples(model: LocalModel) -> None:
    requests = [
        GenerationRequest((1, 2, 3), 3, 12),
        GenerationRequest((9,), 2, 20, temperature=0.5, top_p=0.9),
    ]
    assert model.generate(requests, rng(4)) == model.generate(requests, rng(4))
    assert model.generate(requests, rng(4)) != model.generate(requests, rng(5))


def test_batch_mates_and_retirement_do_not_change_a_row(model: LocalModel) -> None:
    """Row 0 with long batch mates, short ones, or alone in its request's place draws the same tokens."""
    first = GenerationRequest((5, 6), 1, 30, temperature=0.9)
    long = model.generate([first, GenerationRequest((7, 8, 9, 10), 3, 30)], rng(2))
    short = model.generate([first, GenerationRequest((7, 8, 9, 10), 3, 2)], rng(2))
    assert long[0][0].tokens == short[0][0].tokens
    assert [len(s.tokens) for s in short[1]] == [2, 2, 2]


def test_finished_rows_leave_the_batch(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    cls = (
        cache.FastStepper
        if model.engine == "fast"
        else __import__("racelab.experiments.backends.local.plain", fromlist=["PlainStepper"]).PlainStepper
    )
    step = cls.step

    def counted(self: object, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens))
        return step(self, tokens)

    monkeypatch.setattr(cls, "step", counted)
    requests = [GenerationRequest((1, 2), 1, n, temperature=0.0) for n in (1, 3, 6)]
    free = LocalModel(model.core, model._tokenizer, model.path, model.window, frozenset())
    out = free.generate(requests, rng())
    assert sizes == [2, 2, 1, 1, 1]
    assert [len(g[0].tokens) for g in out] == [1, 3, 6]
    assert not any(g[0].finished for g in out)


def test_large_cache_carries_finished_rows_and_gives_the_same(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [GenerationRequest((1, 2, k), 1, 3 + 4 * k, temperature=0.8) for k in range(1, 9)]
    want = model.generate(requests, rng(1))
    monkeypatch.setattr(cache, "_SMALL", 0)
    monkeypatch.setattr(cache, "_COMPACT", 0.5)
    monkeypatch.setattr(cache, "_GROW", 3)
    got = model.generate(requests, rng(1))
    assert [g[0].tokens for g in got] == [w[0].tokens for w in want]


def test_end_token_finishes_and_is_kept(model: LocalModel) -> None:
    free = LocalModel(model.core, model._tokenizer, model.path, model.window, frozenset())
    request = GenerationRequest((3, 1, 4), 1, 20, temperature=0.0)
    tokens = free.generate([request], rng())[0][0].tokens
    ending = LocalModel(model.core, model._tokenizer, model.path, model.window, frozenset({tokens[4]}))
    sample = ending.generate([request], rng())[0][0]
    assert sample.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert sample.finished


def test_stop_string_split_over_tokens(model: LocalModel) -> None:
    """The text of a few greedy tokens as the stop: the sample ends with the token that completes it."""
    free = LocalModel(model.core, model._tokenizer, model.path, model.window, frozenset())
    for seed in range(4):
        request = GenerationRequest((seed, 50 + seed), 1, 24, temperature=0.0)
        tokens = free.generate([request], rng())[0][0].tokens
        for a, b in ((0, 1), (3, 5), (6, 9)):
            stop = free.decode(tokens[a:b])
            if not stop or "\ufffd" in stop:
                continue
            sample = free.generate([GenerationRequest((seed, 50 + seed), 1, 24, 0.0, stop=(stop,))], rng())[
                0
            ][0]
            assert sample.finished
            assert stop in sample.text
            assert stop not in free.decode(sample.tokens[:-1])
            assert sample.tokens == tokens[: len(sample.tokens)]


def test_stop_finder_cases() -> None:
    pieces = {0: "ab", 1: "c\n", 2: "\n", 3: "d", 4: "##"}
    finder = decode.StopFinder(lambda ids: "".join(pieces[i] for i in ids))
    assert finder.hit([0, 1, 2], ["\n\n"])  # two tokens
    assert finder.hit([0, 1], ["c\n"])  # one token
    assert finder.hit([3, 4], ["#"])  # inside a token
    assert not finder.hit([0, 1, 3], ["\n\n"])
    assert not finder.hit([1, 2, 3], ["\n\n", "zz"])  # completed earlier, not by this token


def test_stop_finder_joins_split_characters() -> None:
    """A two-byte character arrives as two tokens, each a replacement character alone."""
    raw = {0: b"\xc3", 1: b"\xa9"}
    finder = decode.StopFinder(lambda ids: b"".join(raw[i] for i in ids).decode(errors="replace"))
    assert not finder.hit([0], ["é"])
    assert finder.hit([0, 1], ["é"])


def test_window_clips_and_refuses(model: LocalModel) -> None:
    free = LocalModel(model.core, model._tokenizer, model.path, 20, frozenset())
    sample = free.generate([GenerationRequest((1,) * 15, 1, 50)], rng())[0][0]
    assert len(sample.tokens) == 5
    assert not sample.finished
    assert len(free.generate([GenerationRequest((1,) * 19, 1, 50)], rng())[0][0].tokens) == 1
    with pytest.raises(DataError, match=r"prefix has 20 tokens .* window holds 20"):
        free.generate([GenerationRequest((1,) * 20, 1, 5)], rng())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": ()}, "prefix is empty"),
        ({"prefix": (9999,)}, "outside 0..259"),
        ({"n": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "empty stop"),
    ],
)
def test_bad_requests_are_named(model: LocalModel, change: dict[str, object], message: str) -> None:
    args: dict[str, object] = {"prefix": (1,), "n": 1, "max_tokens": 2, **change}
    with pytest.raises(DataError, match=message):
        model.generate([GenerationRequest(**args)], rng())  # type: ignore[arg-type]


def test_nothing_asked_nothing_given(model: LocalModel) -> None:
    assert model.generate([], rng()) == []
    assert model.logprobs([]) == []
    out = model.logprobs([((1, 2), [(), (3,)]), ((4,), [])])
    assert [[len(a) for a in g] for g in out] == [[0, 1], []]
    with pytest.raises(DataError, match="window"):
        model.logprobs([((1,) * 150, [(1,) * 20])])


def test_float32_frozen_copy_is_untouched_by_training(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    policy = open_language_model(tmp_path, compute_dtype="float32", train_from_layer=1)
    frozen = policy.frozen_copy()
    before = frozen.logprobs([((1, 2, 3), [(4, 5)])])[0][0]
    for master in policy.core.masters.values():
        master.add_(0.1)
    policy.core.refresh()
    np.testing.assert_array_equal(frozen.logprobs([((1, 2, 3), [(4, 5)])])[0][0], before)
    assert abs(policy.logprobs([((1, 2, 3), [(4, 5)])])[0][0] - before).max() > 1e-3

"""The local engine against transformers: log-probs, gradients, greedy text, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from racelab.experiments.backends.local.fast import split_fused, weight_names
from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.errors import ModelError
from racelab.experiments.types import GenerationRequest

from .local_models import FAMILIES, VOCAB, write_model

FAST = [k for k in FAMILIES if k != "gpt2"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_model(request.param, folder)


def groups(seed: int = 0) -> list[tuple[list[int], list[list[int]]]]:
    """Groups of unequal prefixes and samples, among them a prefix of one token and a sample of one."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return [int(t) for t in rng.integers(0, VOCAB - 4, n)]

    shape = [(7, (5, 9, 1)), (1, (4, 4)), (40, (3, 33, 30, 2)), (12, (6,))]
    return [(draw(p), [draw(t) for t in tails]) for p, tails in shape]


def expected(module: Any, temperature: float) -> torch.Tensor:
    """Log-probs by one transformers pass per sequence, with autograd, flat."""
    out = []
    for prefix, tails in groups():
        for tail in tails:
            ids = torch.tensor([[*prefix, *tail]])
            logp = (module(ids).logits[0].float() / temperature).log_softmax(-1)
            out.append(logp[len(prefix) - 1 : -1].gather(1, torch.tensor(tail)[:, None])[:, 0])
    return torch.cat(out)


def flat(nested: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([a for g in nested for a in g])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_fp32(pair: tuple[str, Path, Any], temperature: float) -> None:
    kind, folder, module = pair
    with torch.no_grad():
        want = expected(module, temperature).numpy()
    for engine in ["plain"] if kind == "gpt2" else ["fast", "plain"]:
        model = open_language_model(folder, role="frozen", compute_dtype="float32", engine=engine)
        assert model.engine == engine
        np.testing.assert_allclose(flat(model.logprobs(groups(), temperature)), want, atol=1e-4)


def test_logprobs_bf16_stay_near_float32(pair: tuple[str, Path, Any]) -> None:
    """Stated bound: mean 0.08, maximum 0.8 nats, on weights far rougher (std 0.3) than a trained model's."""
    _, folder, module = pair
    with torch.no_grad():
        want = expected(module, 1.0).numpy()
    got = flat(open_language_model(folder, role="frozen").logprobs(groups()))
    assert np.abs(got - want).mean() < 0.08
    assert np.abs(got - want).max() < 0.8


def hf_grads(module: Any, coefficients: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
    module.zero_grad()
    (expected(module, temperature) * coefficients).sum().backward()
    return {n: p.grad.clone() for n, p in module.named_parameters()}


def my_grads(model: LocalModel, coefficients: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
    """Gradients of sum c_t log p_t under Hugging Face names."""
    model.accumulate(groups(), temperature, lambda _: lambda logp, part: (coefficients[part], None), None)
    if model.engine == "plain":
        return {n: p.grad.clone() for n, p in model.core.masters.items()}
    out = {}
    for fused, names in weight_names(model.core.spec):
        if fused in model.core.masters:
            parts = split_fused(model.core.spec, fused, model.core.masters[fused].grad)
            out.update(zip(names, parts, strict=True))
    return out


@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_gradients_fp32(pair: tuple[str, Path, Any], temperature: float) -> None:
    _, folder, module = pair
    torch.manual_seed(0)
    coefficients = torch.randn(sum(len(t) for _, tails in groups() for t in tails))
    want = hf_grads(module, coefficients, temperature)
    got = my_grads(open_language_model(folder, compute_dtype="float32"), coefficients, temperature)
    assert set(want) == set(got)
    for name, value in want.items():
        scale = value.abs().max().clamp(min=1.0)
        assert (got[name] - value).abs().max() < 1e-4 * scale, name


def test_gradients_bf16_point_the_same_way(pair: tuple[str, Path, Any]) -> None:
    """Stated bound: cosine with the float32 gradient at least 0.97 over all weights."""
    _, folder, module = pair
    coefficients = torch.randn(113, generator=torch.Generator().manual_seed(0))
    coefficients = coefficients[: sum(len(t) for _, tails in groups() for t in tails)]
    want = hf_grads(module, coefficients, 1.0)
    got = my_grads(open_language_model(folder), coefficients, 1.0)
    a, b = (torch.cat([g[n].float().flatten() for n in sorted(want)]) for g in (want, got))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.97


@pytest.mark.parametrize("kind", FAST)
def test_frozen_layers_get_no_gradient_and_the_rest_the_same(kind: str, tmp_path: Path) -> None:
    module = write_model(kind, tmp_path)
    coefficients = torch.ones(sum(len(t) for _, tails in groups() for t in tails))
    want = hf_grads(module, coefficients, 1.0)
    model = open_language_model(tmp_path, compute_dtype="float32", train_from_layer=2)
    got = my_grads(model, coefficients, 1.0)
    assert all(n == "model.norm.weight" or n.startswith("model.layers.2.") for n in got)
    assert len(got) > 9
    for name, value in got.items():
        assert (value - want[name]).abs().max() < 1e-4 * want[name].abs().max().clamp(min=1.0), name


def test_greedy_is_token_identical(pair: tuple[str, Path, Any]) -> None:
    """Three prompts of unequal length in one batch against transformers' generate, one at a time."""
    kind, folder, module = pair
    prompts = [p for p, _ in groups()][:3]
    for engine in ["plain"] if kind == "gpt2" else ["fast", "plain"]:
        model = open_language_model(folder, role="frozen", compute_dtype="float32", engine=engine, end_ids=())
        requests = [GenerationRequest(tuple(p), 2, 24, temperature=0.0) for p in prompts]
        got = model.generate(requests, torch.Generator().manual_seed(0))
        for prompt, samples in zip(prompts, got, strict=True):
            ids = torch.tensor([prompt])
            want = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
            assert [list(s.tokens) for s in samples] == [want[0, len(prompt) :].tolist()] * 2


def test_rollout_logprobs_equal_scored_ones(pair: tuple[str, Path, Any]) -> None:
    _, folder, _ = pair
    model = open_language_model(folder, role="frozen", compute_dtype="float32")
    requests = [GenerationRequest(tuple(p), 3, 15, temperature=0.8) for p, _ in groups()]
    samples = model.generate(requests, torch.Generator().manual_seed(3))
    scored = model.logprobs(
        [(r.prefix, [s.tokens for s in g]) for r, g in zip(requests, samples, strict=True)], 0.8
    )
    for got, want in zip(samples, scored, strict=True):
        for s, lp in zip(got, want, strict=True):
            np.testing.assert_allclose(s.logprobs, lp, atol=1e-4)


def test_long_sequences_cross_tile_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 queries and a tiny element limit give the same log-probs and gradients as one tile."""
    from racelab.experiments.backends.local import packing

    module = write_model("llama", tmp_path)
    coefficients = torch.randn(200, generator=torch.Generator().manual_seed(1))
    coefficients = coefficients[: sum(len(t) for _, tails in groups() for t in tails)]
    monkeypatch.setattr(packing, "_TILE_ELEMENTS", 600)
    monkeypatch.setattr(packing, "_TILE_QUERIES", 8)
    model = open_language_model(tmp_path, compute_dtype="float32")
    assert max(len(b.tiles) for b in model.packed(groups()).buckets) > 4
    want = hf_grads(module, coefficients, 1.0)
    got = my_grads(model, coefficients, 1.0)
    for name, value in want.items():
        assert (got[name] - value).abs().max() < 1e-4 * value.abs().max().clamp(min=1.0), name


# --- folders whose parts do not fit together ----------------------------------------------------------------


def change(folder: Path, name: str, **values: object) -> None:
    """Set keys of a JSON file of a folder."""
    record = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(record | values), encoding="utf-8")


def refused(folder: Path, engine: Any = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        open_language_model(folder, role="frozen", engine=engine)
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


@pytest.mark.parametrize("engine", ["fast", "plain"])
@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("hidden_size", 64, "embed_tokens"),
        ("num_hidden_layers", 2, "layers.2."),
        ("num_hidden_layers", 4, "layers.3."),
        ("intermediate_size", 40, "mlp."),
        ("vocab_size", 200, "embed_tokens"),
        ("num_attention_heads", 8, "self_attn."),
        ("num_key_value_heads", 1, "self_attn.k_proj"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, engine: str, key: str, value: int, tensor: str
) -> None:
    write_model("llama", tmp_path)
    change(tmp_path, "config.json", **{key: value, "head_dim": None})
    text = refused(tmp_path, engine)
    if engine == "fast":
        assert tensor in text
        assert "config.json" in text


def test_a_shape_that_does_not_fit_shows_both(tmp_path: Path) -> None:
    """The file's embedding is [260, 32]."""
    write_model("llama", tmp_path)
    change(tmp_path, "config.json", vocab_size=200)
    text = refused(tmp_path, "fast")
    assert "model.embed_tokens.weight has shape [260, 32], config.json says [200, 32]" in text


def test_biases_are_not_dropped_when_the_family_is_wrong(tmp_path: Path) -> None:
    write_model("qwen2", tmp_path)
    change(tmp_path, "config.json", model_type="llama")
    assert "_proj.bias is not part of the 3 layers" in refused(tmp_path, "fast")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("[]", "config.json holds a list"),
        ("{}", "model_type is missing"),
        ("{", "config.json is not JSON"),
        ('{"model_type": "llama"}', "num_hidden_layers is missing"),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path: Path, body: str, part: str) -> None:
    write_model("llama", tmp_path)
    (tmp_path / "config.json").write_text(body, encoding="utf-8")
    assert part in refused(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("num_attention_heads", "4", "num_attention_heads is '4'"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("vocab_size", True, "vocab_size is True"),
        ("rms_norm_eps", "x", "rms_norm_eps is 'x'"),
        ("rope_parameters", 3, "rope_parameters is 3"),
        ("rope_parameters", {"rope_theta": "x"}, "rope_parameters.rope_theta is 'x'"),
        ("num_key_value_heads", 3, "3 does not divide num_attention_heads 4"),
    ],
)
def test_sizes_that_are_no_sizes_are_named(tmp_path: Path, key: str, value: object, part: str) -> None:
    write_model("llama", tmp_path)
    change(tmp_path, "config.json", **{key: value})
    assert part in refused(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("keep", [0, 40, 5000])
def test_damaged_weights_are_named(tmp_path: Path, kind: str, keep: int) -> None:
    write_model(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path)


@pytest.mark.parametrize("beside", [True, False])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, beside: bool) -> None:
    write_model("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    if not beside:
        (tmp_path / "tokenizer_config.json").unlink()
    assert "the tokenizer cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize(
    ("body", "part"),
    [("{", "generation_config.json is not JSON"), ('{"eos_token_id": "x"}', "whole numbers")],
)
def test_a_damaged_generation_config_is_named(tmp_path: Path, body: str, part: str) -> None:
    write_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(body, encoding="utf-8")
    assert part in refused(tmp_path)

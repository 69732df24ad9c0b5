"""The sentence encoder, on a tiny random BERT written to disk (and on MiniLM when it is installed)."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
import torch

from racelab.experiments.errors import ModelError
from racelab.experiments.models.encoder import SentenceEncoder
from racelab.experiments.ports import Encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "sea", "red", "on", "the"]
TEXTS = ["cat", "the cat on the sea", "dog", "red " * 20, "", "the red dog on the red sea the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("bert")
    (path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(path / "vocab.txt")).save_pretrained(path)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        BertModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("pooling", ["mean", "last_token"])
def test_rows_are_of_unit_length_and_do_not_depend_on_the_others(folder, pooling):
    together = SentenceEncoder(folder, pooling=pooling).embed(TEXTS)
    assert together.shape == (6, 16)
    assert together.dtype == np.float64
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-12)
    alone = SentenceEncoder(folder, pooling=pooling)
    np.testing.assert_allclose(np.concatenate([alone.embed([t]) for t in TEXTS]), together, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last_token"])
def test_pooling_is_that_of_the_plain_model(folder, pooling):
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    text = "the cat on the sea"
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().numpy()
    expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
    row = SentenceEncoder(folder, pooling=pooling).embed([text])[0]
    np.testing.assert_allclose(row, expected / np.linalg.norm(expected), atol=1e-5)


def test_equal_texts_give_equal_rows_in_any_order(folder):
    encoder = SentenceEncoder(folder, batch_size=2)
    rows = encoder.embed(["dog", "cat", "dog", "sea", "red", "dog"])
    assert (rows[0] == rows[2]).all()
    assert (rows[0] == rows[5]).all()
    assert (encoder.embed(["cat", "dog"])[1] == rows[0]).all()
    assert not np.allclose(rows[0], rows[1])


def test_the_cache_is_bounded_and_saves_forward_passes(folder):
    encoder = SentenceEncoder(folder, cache_size=2)
    passes = []
    forward = encoder._forward
    encoder._forward = lambda ids: passes.append(len(ids)) or forward(ids)
    assert encoder.embed(["cat", "dog", "sea", "red"]).shape == (4, 16)
    assert (passes, len(encoder._rows)) == ([4], 2)
    encoder.embed(["sea", "red"])
    assert passes == [4]
    encoder.embed(["cat", "red", "red"])
    assert passes == [4, 1]


def test_long_texts_are_cut_and_none_is_fine(folder):
    encoder = SentenceEncoder(folder, max_length=10)
    rows = encoder.embed(["red " * 30, "red " * 40])
    assert (rows[0] == rows[1]).all()
    assert encoder.embed([]).shape == (0, 16)
    assert SentenceEncoder(folder, max_length=10_000).embed(["red " * 500]).shape == (1, 16)


def test_bfloat16_is_close(folder):
    exact, rough = (SentenceEncoder(folder, dtype=d).embed(TEXTS) for d in ("float32", "bfloat16"))
    assert (exact * rough).sum(1).min() > 0.99
    assert not np.array_equal(exact, rough)


def test_describe_holds_the_hash_of_the_weights(folder):
    encoder = SentenceEncoder(folder, max_length=32)
    assert isinstance(encoder, Encoder)
    assert encoder.describe() == {
        "folder": folder.name,
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "pooling": "mean",
        "max_length": 32,
        "dtype": "float32",
    }


def test_missing_or_broken_folders_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"nothing has no config.json"):
        SentenceEncoder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        SentenceEncoder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_files_of_an_encoder_are_named(folder, tmp_path, name):
    broken = tmp_path / "bert"
    shutil.copytree(folder, broken)
    (broken / name).write_bytes((broken / name).read_bytes()[:40])
    with pytest.raises(ModelError, match=r"bert cannot be loaded: \S") as caught:
        SentenceEncoder(broken)
    assert "\n" not in str(caught.value)

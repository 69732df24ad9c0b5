"""A trained model written to a folder is the same model for transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from racelab.experiments.backends.local.export import export_model
from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
from racelab.experiments.backends.local.model import open_language_model
from racelab.experiments.errors import ModelError
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.types import TokenBatch, TrainGroup, TrainSample

from .local_models import write_model


@pytest.mark.parametrize("kind", ["qwen2", "llama_untied", "gpt2"])
@pytest.mark.parametrize("train_from", [0, 2])
def test_exported_folder_scores_as_the_trained_policy(kind: str, train_from: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_model(kind, tmp_path / "base")
    policy = open_language_model(tmp_path / "base", compute_dtype="float32", train_from_layer=train_from)
    sample = TrainSample((7, 8, 9), np.ones(3), np.full(3, 1 / 3))
    before = policy.logprobs([((1, 2), [sample.tokens])])[0][0]
    LocalBackend(policy, OptimSettings(lr=1e-2)).update(TokenBatch((TrainGroup((1, 2), (sample,)),)))
    after = policy.logprobs([((1, 2), [sample.tokens])])[0][0]
    assert np.abs(after - before).max() > 1e-3
    folder = export_model(policy, tmp_path / "out")
    assert resolve_model(str(folder)) == folder
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert module.dtype == torch.float32
    with torch.no_grad():
        logp = module(torch.tensor([[1, 2, 7, 8, 9]])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(logp[[1, 2, 3], [7, 8, 9]].numpy(), after, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).encode("<eos>a") == policy.encode("<eos>a")
    with pytest.raises(ModelError, match="already holds weights"):
        export_model(policy, folder)
    with pytest.raises(ModelError, match="frozen"):
        export_model(policy.frozen_copy(), tmp_path / "other")

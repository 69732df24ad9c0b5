"""A scalar reward model: a transformers sequence-classification model with one label (RACE §6.1: Skywork-Reward-V2).

Two kinds of folder. A full one is what `save_pretrained` of such a model writes. A head folder holds nothing but the
one-label head (`head.safetensors`) and says on which model it stands (`reward_head.json`), so that a run need not keep
a second copy of that model; `export_classifier` makes a full folder of it.

The reward is sigmoid(logit), in [0, 1]. Thinking is kept, as the published setting keeps it. A conversation that is
longer than `max_length` has no score: cutting it would score another one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from racelab.experiments.errors import ModelError
from racelab.experiments.fsio import read_json
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.models.text import defang
from racelab.experiments.types import FloatArray, Prompt, Sample

if TYPE_CHECKING:
    import torch

HEAD_FILE, WEIGHTS_FILE = "reward_head.json", "head.safetensors"
_BATCH_TOKENS = 8192  # padded tokens of a forward pass

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Classifier:
    """An opened sequence-classification model.

    Attributes:
        module: a transformers model with one label.
        tokenizer: its tokenizer; `pad_token_id` is set in both.
        window: longest sequence.
        sha256: of all weights that make a score.
    """

    module: Any
    tokenizer: Any
    window: int
    sha256: str

    def tokens(self, prompt: str, answer: str) -> list[int]:
        """The conversation in the model's chat template; without one, the texts with a blank line between them."""
        turns = [
            {"role": "user", "content": defang(prompt)},
            {"role": "assistant", "content": defang(answer)},
        ]
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        else:
            end = self.tokenizer.eos_token or ""
            text = f"{turns[0]['content']}\n\n{turns[1]['content']}{end}"
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def batches(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices that run together: of like length, the shortest first."""
        out: list[list[int]] = []
        for i in sorted(range(len(rows)), key=lambda i: (len(rows[i]), i)):
            if out and (len(out[-1]) + 1) * len(rows[i]) <= _BATCH_TOKENS:
                out[-1].append(i)
            else:
                out.append([i])
        return out

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [B, T], padded on the right."""
        import torch

        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.arange(width)[None, :] < torch.tensor([len(row) for row in rows])[:, None]
        device = self.module.device
        return ids.to(device), mask.long().to(device)


class ClassifierRewardModel:
    """sigmoid of a classifier's one logit; implements `ports.RewardModel`."""

    def __init__(self, classifier: Classifier, *, max_length: int) -> None:
        """Keeps the parts; `max_length` in tokens, at most the model's window."""
        self.classifier = classifier
        self.max_length = min(max_length, classifier.window)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> list[FloatArray]:
        """[G] in [0, 1] for each prompt's responses, NaN where the conversation is longer than `max_length`."""
        return [1.0 / (1.0 + np.exp(-z)) for z in self.logits(prompts, responses)]

    def logits(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> list[FloatArray]:
        """[G] for each prompt's responses, NaN as in `score`; they have no bounds and do not saturate."""
        rows = [
            self.classifier.tokens(p.text, y.text)
            for p, ys in zip(prompts, responses, strict=True)
            for y in ys
        ]
        fits = [i for i, row in enumerate(rows) if len(row) <= self.max_length]
        found = np.full(len(rows), math.nan)
        found[fits] = self._logits([rows[i] for i in fits])
        cuts = np.cumsum([len(ys) for ys in responses])[:-1]
        return list(np.split(found, cuts)) if responses else []

    def describe(self) -> dict[str, object]:
        """Hash of the weights and settings (JSON values)."""
        return {
            "kind": "classifier",
            "sha256": self.classifier.sha256,
            "max_length": self.max_length,
            "dtype": str(self.classifier.module.dtype).removeprefix("torch."),
        }

    def _logits(self, rows: Sequence[Sequence[int]]) -> FloatArray:
        import torch

        out = np.zeros(len(rows))
        for batch in self.classifier.batches(rows):
            ids, mask = self.classifier.padded([rows[i] for i in batch])
            with torch.inference_mode():
                logits = self.classifier.module(input_ids=ids, attention_mask=mask).logits
            out[batch] = logits[:, 0].float().cpu().double().numpy()
        return out


def open_classifier(
    folder: str | Path, *, dtype: Dtype = "bfloat16", device: str = "cpu", base: Path | None = None
) -> Classifier:
    """Opens a full folder or a head folder.

    Args:
        folder: see the module's docstring.
        dtype: of weights and forward pass.
        device: `cpu` or `cuda`.
        base: the model under a head, if it was found already; otherwise it is looked up by the name in the folder.

    Raises:
        ModelError: no such model, more than one label, or a base that is not the one the head was fitted on.
    """
    path = Path(folder)
    if not (path / HEAD_FILE).is_file():
        module, tokenizer = _load(path, dtype, {})
        return _classifier(path, module, tokenizer, device, model_sha256(path))
    head = read_json(path / HEAD_FILE)
    base = base or resolve_model(head["base"]["source"], revision=head["base"]["revision"])
    if model_sha256(base) != head["base"]["sha256"]:
        raise ModelError(
            f"reward model {path}: its head was fitted on {head['base']['source']} with other weights "
            f"({head['base']['sha256'][:12]}); put those back, or remove the folder to fit anew"
        )
    module, tokenizer = new_head(base, dtype)
    module.score.weight.data.copy_(_head_weights(path, module.score.weight.shape))
    body = f"{head['base']['sha256']} {model_sha256(path)}"
    return _classifier(path, module, tokenizer, device, hashlib.sha256(body.encode()).hexdigest())


def new_head(base: Path, dtype: Dtype) -> tuple[Any, Any]:
    """A causal model's folder as a classifier with one label and a head of zeros, and its tokenizer.

    Raises:
        ModelError: the architecture has no such classifier.
    """
    module, tokenizer = _load(base, dtype, {"num_labels": 1})
    score = getattr(module, "score", None)
    if score is None or getattr(score, "bias", None) is not None:
        raise ModelError(f"model folder {base}: {type(module).__name__} has no bias-free head named score")
    score.weight.data.zero_()
    return module, tokenizer


def opened(base: Path, module: Any, tokenizer: Any, device: str) -> Classifier:
    """What `new_head` gave, ready to run."""
    return _classifier(base, module, tokenizer, device, model_sha256(base))


def write_head(folder: Path, weights: FloatArray, facts: dict[str, object]) -> None:
    """Writes a head folder, the description last; `facts` needs `base` (source, revision, sha256)."""
    import torch
    from safetensors.torch import save_file

    from racelab.experiments import fence
    from racelab.experiments.fsio import write_json_atomic

    fence.check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensor = torch.from_numpy(np.asarray(weights, dtype=np.float32).reshape(1, -1).copy())
    save_file({"score.weight": tensor}, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_json_atomic(folder / HEAD_FILE, facts)


def export_classifier(classifier: Classifier, folder: str | Path) -> Path:
    """Writes a full folder, which `AutoModelForSequenceClassification` opens anywhere.

    Raises:
        ModelError: the folder holds weights already.
    """
    target = Path(folder)
    if any(target.glob("*.safetensors")):
        raise ModelError(f"export folder {target} already holds weights; give an empty one")
    classifier.module.save_pretrained(target)
    classifier.tokenizer.save_pretrained(target)
    return target


def _classifier(path: Path, module: Any, tokenizer: Any, device: str, sha256: str) -> Classifier:
    """Checks the labels and settles which token pads."""
    if module.config.num_labels != 1:
        raise ModelError(
            f"reward model {path}: {module.config.num_labels} labels; a reward model has one, "
            "set method.source to such a folder"
        )
    text = module.config.get_text_config()
    if tokenizer.pad_token_id is None:
        # the classifier looks for the last token that is not padding, so it must know which token pads
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    text.pad_token_id = module.config.pad_token_id = tokenizer.pad_token_id
    window = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    return Classifier(module.eval().to(device), tokenizer, int(window), sha256)


def _load(folder: Path, dtype: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, offline."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a new head is reported as missing weights
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            local_files_only=True,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **options,
        )
        module, report = found
    except MemoryError:
        raise
    except Exception as error:  # a damaged file comes as whatever error the reading library has
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"reward model {folder} cannot be loaded: {reason}") from error
    finally:
        logging.set_verbosity(level)
    missing = sorted(set(report["missing_keys"]) - ({"score.weight"} if options else set()))
    if missing:
        raise ModelError(
            f"reward model {folder}: tensor {missing[0]} is missing; give a sequence-classification model"
        )
    return module, tokenizer


def _head_weights(folder: Path, shape: Sequence[int]) -> torch.Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(str(folder / WEIGHTS_FILE))["score.weight"]
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"reward model {folder}: {WEIGHTS_FILE} cannot be read; remove the folder to fit anew"
        ) from error
    if tuple(weights.shape) != tuple(shape):
        raise ModelError(
            f"reward model {folder}: {WEIGHTS_FILE} has shape {tuple(weights.shape)}, not {tuple(shape)}"
        )
    return weights

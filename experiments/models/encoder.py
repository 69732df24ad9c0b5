"""A frozen sentence encoder (RACE Eq 7). Imports torch and transformers only when one is made."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from racelab.experiments.errors import ModelError
from racelab.experiments.types import FloatArray

if TYPE_CHECKING:
    import torch

Pooling = Literal["mean", "last_token"]
_BUCKET = 8  # lengths are padded up to a multiple of this


class SentenceEncoder:
    """Embeddings from a transformers model folder; implements `ports.Encoder`.

    A text is padded to a length that depends on the text alone, so its row does not depend on the texts
    around it (beyond the rounding of another batch size); rows are kept by text, so equal texts give equal
    rows.

    Attributes:
        width: D.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        pooling: Pooling = "mean",
        max_length: int = 256,
        batch_size: int = 32,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
        cache_size: int = 4096,
    ) -> None:
        """Loads the model.

        Args:
            folder: a transformers model folder with its tokenizer.
            pooling: `mean` over the tokens, or the `last_token` (Eq 7).
            max_length: longer texts are cut to this many tokens.
            batch_size: texts per forward pass.
            dtype: of the weights and the forward pass; pooling is always done in float32.
            device: `cpu`, `cuda` or `cuda:0`.
            cache_size: rows kept, the least recently used dropped first.

        Raises:
            ModelError: the folder is missing, or it cannot be read as a model.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for a load of 30 ms is noise in a log

        path = Path(folder)
        if not (path / "config.json").is_file():
            raise ModelError(f"encoder folder {path} has no config.json; give a transformers model folder")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            model = AutoModel.from_pretrained(str(path), local_files_only=True, dtype=getattr(torch, dtype))
        except Exception as error:  # a damaged file comes as whatever error the reading library has
            raise ModelError(f"encoder folder {path} cannot be loaded: {_first_line(error)}") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = model.eval().to(device)
        limit = getattr(model.config, "max_position_embeddings", None) or max_length
        self._max_length = min(max_length, limit)
        self._path, self._pooling, self._dtype = path, pooling, dtype
        self._batch_size, self._cache_size, self._device = batch_size, cache_size, device
        self._rows: OrderedDict[str, FloatArray] = OrderedDict()
        self.width = int(model.config.hidden_size)

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """[n, D], rows of unit length. Equal texts give equal rows."""
        rows = {t: self._rows[t] for t in texts if t in self._rows}
        for batch in self._batches([t for t in dict.fromkeys(texts) if t not in rows]):
            rows.update(zip((t for t, _ in batch), self._forward([ids for _, ids in batch]), strict=True))
        self._rows.update(rows)
        for text in rows:
            self._rows.move_to_end(text)
        while len(self._rows) > self._cache_size:
            self._rows.popitem(last=False)
        return np.stack([rows[t] for t in texts]) if texts else np.zeros((0, self.width))

    def forget(self) -> None:
        """Empties the cache (the size of a batch can change the last bits of a row)."""
        self._rows.clear()

    def describe(self) -> dict[str, object]:
        """Folder name, weight hash and settings (JSON values)."""
        return {
            "folder": self._path.name,
            "sha256": folder_sha256(self._path),
            "pooling": self._pooling,
            "max_length": self._max_length,
            "dtype": self._dtype,
        }

    def _batches(self, texts: Sequence[str]) -> list[list[tuple[str, list[int]]]]:
        """Texts with their token ids, in batches of one padded length each, the shortest first."""
        buckets: dict[int, list[tuple[str, list[int]]]] = {}
        for text in texts:
            ids = self._tokenizer(text or " ", truncation=True, max_length=self._max_length)["input_ids"]
            ids = ids or [self._tokenizer.pad_token_id]
            buckets.setdefault(-(-len(ids) // _BUCKET) * _BUCKET, []).append((text, ids))
        return [
            rows[i : i + self._batch_size]
            for _, rows in sorted(buckets.items())
            for i in range(0, len(rows), self._batch_size)
        ]

    def _forward(self, ids: Sequence[Sequence[int]]) -> FloatArray:
        import torch

        length = min(-(-max(map(len, ids)) // _BUCKET) * _BUCKET, max(self._max_length, 1))
        pad = self._tokenizer.pad_token_id
        tokens = torch.tensor([[*row, *[pad] * (length - len(row))] for row in ids], device=self._device)
        lengths = torch.tensor([len(row) for row in ids], device=self._device)
        mask = (torch.arange(length, device=self._device)[None, :] < lengths[:, None]).long()
        with torch.inference_mode():
            hidden = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
            pooled = self._pool(hidden, mask, lengths)
        rows: FloatArray = pooled.cpu().double().numpy()
        norms: FloatArray = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        unit: FloatArray = rows / norms
        return unit

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, D]."""
        if self._pooling == "mean":
            return (hidden * mask[..., None]).sum(1) / lengths[:, None]
        return hidden[range(len(hidden)), lengths - 1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def folder_sha256(folder: Path) -> str:
    """SHA-256 over the weight files (.safetensors, .bin) of a folder, in name order; empty if none."""
    digest, found = hashlib.sha256(), False
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        found = True
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if found else ""

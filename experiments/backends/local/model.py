"""Opening a model folder, and the ports `LanguageModel` and `DialogueModel` on top of the two paths.

This module imports torch: import it lazily. It has been tested on CPU; on CUDA the same code runs without
oneDNN's prepacked layers, but nobody has run it there yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from racelab.experiments.backends.local import decode
from racelab.experiments.backends.local.cache import FastStepper
from racelab.experiments.backends.local.decode import Draws
from racelab.experiments.backends.local.fast import FastModel, read_weights
from racelab.experiments.backends.local.head import Coefficient
from racelab.experiments.backends.local.packing import Group, Packed, pack
from racelab.experiments.backends.local.plain import PlainModel, PlainStepper, load_plain, one_line
from racelab.experiments.backends.local.spec import config_problem, fast_spec
from racelab.experiments.errors import ConfigError, DataError, ModelError
from racelab.experiments.models.dialogue import Dialogue, Messages
from racelab.experiments.types import FloatArray, GenerationRequest, Sample

_SCORE_TOKENS = 4096  # tokens scored in one pass


class LocalModel:
    """A causal language model in this process; implements `ports.DialogueModel`.

    Attributes:
        eos_id: the token that ends an answer of the chat template.
        window: longest sequence, prefix and continuation together.
        path: the folder it was read from.
        core: the fast or the plain model.
        end_ids: tokens that end a sample.
    """

    def __init__(
        self, core: FastModel | PlainModel, tokenizer: Any, path: Path, window: int, end_ids: frozenset[int]
    ) -> None:
        """Use `open_language_model`."""
        self.core, self.path, self.window, self.end_ids = core, path, window, end_ids
        self._tokenizer = tokenizer
        self.eos_id: int = (
            tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(end_ids, default=-1)
        )
        self._finder = decode.StopFinder(self._decode_all)
        self._dialogue: Dialogue | None = None

    @property
    def engine(self) -> str:
        """`fast` or `plain`."""
        return "fast" if isinstance(self.core, FastModel) else "plain"

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.core.spec.vocab if isinstance(self.core, FastModel) else self.core.vocab

    def encode(self, text: str) -> list[int]:
        """See the port."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See the port."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _decode_all(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        """See the port. A model without a chat template gets the texts separated by blank lines."""
        if not self._tokenizer.chat_template:
            return self.encode("\n\n".join(t for t in (system, user) if t) + "\n\n")
        turns = [{"role": "user", "content": user}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def opening(self, system: str, user: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """See the port, and `models/dialogue.py`. Special tokens written in the texts are broken up.

        Raises:
            ModelError: the chat template cannot be used turn by turn.
        """
        return self._conversation().opening(system, user, tools)

    def bridge(self, user: str, *, ended: bool) -> list[int]:
        """See `opening`."""
        return self._conversation().bridge(user, ended=ended)

    def _conversation(self) -> Dialogue:
        """The template's pieces, cut when they are first needed."""
        if self._dialogue is None:
            t = self._tokenizer
            special = {str(a) for a in t.added_tokens_decoder.values() if a.special} | set(
                t.all_special_tokens
            )
            render = self._rendered if t.chat_template else None
            self._dialogue = Dialogue(render, self.encode, eos_id=self.eos_id, special=sorted(special))
        return self._dialogue

    def _rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat template's text up to and including the assistant's header."""
        turns, schemas = [dict(m) for m in messages], None if tools is None else [dict(t) for t in tools]
        return str(
            self._tokenizer.apply_chat_template(
                turns, tools=schemas, tokenize=False, add_generation_prompt=True
            )
        )

    def converse(self, messages: Messages, options: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Token ids of a conversation up to and including the assistant's header, special tokens read as such.

        Args:
            messages: as in `Dialogue`; without a chat template the texts are separated by blank lines.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: the template refuses the conversation (its order of roles, say).
        """
        if not self._tokenizer.chat_template:
            return self.encode("\n\n".join(m["content"] for m in messages if m["content"]) + "\n\n")
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **options
            )
        except TemplateError as error:
            raise DataError(f"the model's chat template refuses the messages ({one_line(error)})") from None
        return self.encode(text)

    def generate(self, requests: Sequence[GenerationRequest], rng: Draws) -> list[list[Sample]]:
        """Decode all requests in one batch; see the port. `rng` may also be a function (`Draws`).

        Temperature 0 is greedy, and its log-probs are those of the plain softmax (temperature 1).

        Raises:
            DataError: an empty prefix, one that fills the window, or a setting out of range.
        """
        if not requests:
            return []
        decode.check(requests, self.window, self.vocab)
        stepper = FastStepper(self.core) if isinstance(self.core, FastModel) else PlainStepper(self.core)
        rows = decode.run(requests, rng, stepper, self._finder, self.end_ids, self.window, self.core.device)
        return [
            [Sample(tuple(r.tokens), tuple(r.logprobs), self.decode(r.tokens), r.finished) for r in group]
            for group in rows
        ]

    def logprobs(
        self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], temperature: float = 1.0
    ) -> list[list[FloatArray]]:
        """See the port. Long lists are scored in pieces of a few thousand tokens; order does not matter.

        Raises:
            DataError: an empty prefix, or a sequence longer than the window.
        """
        flat: list[FloatArray] = []
        for piece in split_groups([(p, [t for t in tails if len(t)]) for p, tails in groups], _SCORE_TOKENS):
            self.check_groups(piece)
            values = self.score(piece, temperature).cpu().numpy().astype(np.float64)
            sizes = [len(t) for _, tails in piece for t in tails]
            flat += np.split(values, np.cumsum(sizes)[:-1])
        known = iter(flat)
        return [[next(known) if len(t) else np.zeros(0) for t in tails] for _, tails in groups]

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raise DataError for what cannot be scored."""
        for prefix, tails in groups:
            longest = len(prefix) + max(map(len, tails), default=0)
            if not len(prefix):
                raise DataError("a prefix to score is empty; give at least one token")
            if longest > self.window:
                raise DataError(
                    f"a sequence of {longest} tokens exceeds the model's window of {self.window}; shorten it"
                )

    def packed(self, groups: Sequence[Group]) -> Packed:
        """Lay groups out for the fast path."""
        assert isinstance(self.core, FastModel)
        return pack(groups, heads=self.core.spec.heads, dtype=self.core.dtype, device=self.core.device)

    def score(self, groups: Sequence[Group], temperature: float) -> Tensor:
        """Log p of every token of every sample, flat [tokens] float32, in one pass without gradient."""
        if isinstance(self.core, FastModel):
            return self.core.logprobs(self.packed(groups), temperature)
        return self.core.logprobs(groups, temperature)

    def accumulate(
        self,
        groups: Sequence[Group],
        temperature: float,
        coefficient: Callable[[Tensor | None], Coefficient],
        reference: LocalModel | None,
    ) -> Tensor:
        """Forward, backward, gradients added to the masters; see `FastModel.accumulate`. Flat log-probs."""
        other = None if reference is None else reference.core
        if isinstance(self.core, FastModel):
            assert other is None or isinstance(other, FastModel)
            return self.core.accumulate(self.packed(groups), temperature, coefficient, other)
        assert other is None or isinstance(other, PlainModel)
        return self.core.accumulate(groups, temperature, coefficient, other)

    def frozen_copy(self) -> LocalModel:
        """The present weights as a frozen model. What is not trained is shared, not copied."""
        return LocalModel(self.core.frozen_copy(), self._tokenizer, self.path, self.window, self.end_ids)


def split_groups(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Cut groups into pieces of at most `limit` tokens (prefix once, plus samples).

    A group larger than the limit is split over its samples (each part repeats the prefix); a single sample
    larger than the limit makes a piece of its own. Groups without samples are left out.
    """
    pieces: list[list[Group]] = []
    room = 0
    for prefix, tails in groups:
        part: list[Sequence[int]] = []
        for tail in tails:
            cost = len(tail) + (0 if part else len(prefix))
            if cost > room:
                if part:
                    pieces[-1].append((prefix, part))
                    part = []
                pieces.append([])
                room, cost = limit, len(tail) + len(prefix)
            part.append(tail)
            room -= cost
        if part:
            pieces[-1].append((prefix, part))
    return pieces


def open_language_model(
    path: str | Path,
    *,
    role: Literal["policy", "frozen"] = "policy",
    engine: Literal["auto", "fast", "plain"] = "auto",
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: str = "cpu",
    train_from_layer: int = 0,
    window: int | None = None,
    end_ids: Sequence[int] | None = None,
) -> LocalModel:
    """Open a model folder (see `models.assets.resolve_model`).

    Args:
        path: folder with config.json, tokenizer and safetensors.
        role: `policy` keeps float32 masters of what is trained; `frozen` keeps compute copies only.
        engine: `fast` for the Llama family, `plain` for any causal LM, `auto` takes fast where it applies.
        compute_dtype: type of the forward and backward passes.
        device: `cpu`, `cuda` or `cuda:<n>`.
        train_from_layer: layers below it (and, if it is not 0, embedding and head) stay frozen.
        window: shorter limit than the model's own; None keeps the model's.
        end_ids: tokens that end a sample; None takes the tokenizer's and generation config's; empty: none.

    Raises:
        ModelError: the folder does not hold a model that the engine can run.
        ConfigError: an option out of range.
    """
    folder = Path(path)
    config = _config(folder)
    spec = fast_spec(config)
    if engine == "fast" and spec is None:
        raise ModelError(
            f"model folder {folder}: the fast path does not support this {config.get('model_type')} variant; "
            "set model.engine=auto"
        )
    if compute_dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"compute_dtype {compute_dtype}: must be bfloat16 or float32")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: this torch sees no GPU; set model.device=cpu")
    depth = config.get("num_hidden_layers", config.get("n_layer", 0))
    if not 0 <= train_from_layer < max(depth, 1):
        raise ConfigError(
            f"train_from_layer {train_from_layer}: must be in 0..{max(depth, 1) - 1} for {folder.name}"
        )
    dtype = torch.bfloat16 if compute_dtype == "bfloat16" else torch.float32
    train_from = train_from_layer if role == "policy" else None
    core: FastModel | PlainModel
    if spec is not None and engine != "plain":
        core = FastModel(spec, read_weights(folder, spec), dtype, device, train_from)
    else:
        core = load_plain(folder, dtype, device, train_from)
    own = int(config.get("max_position_embeddings") or config.get("n_positions") or 1 << 20)
    tokenizer = _tokenizer(folder)
    ends = _end_ids(folder, config, tokenizer) if end_ids is None else frozenset(end_ids)
    return LocalModel(core, tokenizer, folder, min(own, window or own), ends)


def _config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, with sizes that can be computed with."""
    config = _json(folder, "config.json")
    problem = config_problem(config)
    if problem is not None:
        raise ModelError(
            f"model folder {folder}: config.json: {problem}; give the one that was saved with the weights"
        )
    depth = config.get("num_hidden_layers", config.get("n_layer", 0))
    if not isinstance(depth, int):
        raise ModelError(f"model folder {folder}: config.json: the number of layers is {depth!r}")
    return config


def _json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model folder."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ModelError(f"model folder {folder}: {name} is missing") from e
    except OSError as e:
        raise ModelError(f"model folder {folder}: {name} cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise ModelError(f"model folder {folder}: {name} is not JSON ({e})") from e
    if not isinstance(found, dict):
        raise ModelError(f"model folder {folder}: {name} holds a {type(found).__name__}, not an object")
    return found


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; a bare tokenizer.json is enough."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
            fast: Any = PreTrainedTokenizerFast
            return fast(tokenizer_file=str(folder / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as e:  # the tokenizers library raises plain Exception for a damaged file
        raise ModelError(f"model folder {folder}: the tokenizer cannot be loaded ({one_line(e)})") from e


def _end_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every token that the folder declares as an end."""
    found: set[int] = set()
    declared = [config.get("eos_token_id"), tokenizer.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        declared.append(_json(folder, generation.name).get("eos_token_id"))
    for value in declared:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if not all(isinstance(token, int) for token in found):
        raise ModelError(
            f"model folder {folder}: eos_token_id {sorted(map(str, found))} must be whole numbers"
        )
    return frozenset(found)

"""The shape of a Llama-type model, read from its config.json; None where the fast path does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes and switches of a pre-norm, rotary, gated-SiLU decoder.

    Attributes:
        layers: number of blocks.
        width: residual stream.
        heads: query heads; `kv_heads` divides it.
        head_dim: width of one head.
        ffn: width of the gated layer.
        vocab: rows of the embedding.
        eps: RMS norm epsilon.
        theta: rotary base.
        window: longest sequence.
        qkv_bias: q, k, v projections have a bias (Qwen2).
        qk_norm: RMS norm on each head of q and k before the rotation (Qwen3).
        tied: the head is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    theta: float
    window: int
    qkv_bias: bool
    qk_norm: bool
    tied: bool

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, by its name in a Hugging Face file."""
        *_, module, kind = name.split(".")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "embed_tokens": (self.vocab, self.width),
            "lm_head": (self.vocab, self.width),
            "q_proj": (q, self.width),
            "k_proj": (kv, self.width),
            "v_proj": (kv, self.width),
            "o_proj": (self.width, q),
            "gate_proj": (self.ffn, self.width),
            "up_proj": (self.ffn, self.width),
            "down_proj": (self.width, self.ffn),
        }
        if module in matrices:
            return matrices[module][:1] if kind == "bias" else matrices[module]
        return (self.head_dim,) if module in ("q_norm", "k_norm") else (self.width,)


_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")


def config_problem(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers of a config.json of one of `FAMILIES`; None if nothing is.

    Other families are not judged: their keys have other names.
    """
    if not isinstance(config.get("model_type"), str):
        return "model_type is missing"
    if config["model_type"] not in FAMILIES:
        return None
    for key in (*_SIZES, *_OPTIONAL_SIZES):
        value = config.get(key)
        if value is None and key in _OPTIONAL_SIZES:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{key} is {value!r}, not a whole number above 0" if key in config else f"{key} is missing"
    for key in ("rms_norm_eps", "rope_theta"):
        if not isinstance(config.get(key, 1.0), int | float):
            return f"{key} is {config[key]!r}, not a number"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            return f"{key} is {config[key]!r}, not an object"
        theta = (config.get(key) or {}).get("rope_theta", 1.0)
        if not isinstance(theta, int | float):
            return f"{key}.rope_theta is {theta!r}, not a number"
    heads = config["num_attention_heads"]
    if heads % (config.get("num_key_value_heads") or heads):
        return (
            f"num_key_value_heads {config['num_key_value_heads']} does not divide num_attention_heads {heads}"
        )
    return None


def fast_spec(config: Mapping[str, Any]) -> Spec | None:
    """The fast path's view of a config.json (as a dict), or None if some part of it is not supported.

    Not supported: other families, scaled rotary embeddings, sliding windows shorter than the context, biases
    on the output or feed-forward layers, other activations, partial rotary embeddings.
    """
    family = config.get("model_type")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    window = config.get("max_position_embeddings", 2048)
    bias = bool(config.get("attention_bias", False))
    refused = (
        family not in FAMILIES
        or kind != "default"
        or config.get("hidden_act", "silu") != "silu"
        or bool(config.get("mlp_bias", False))
        or bias  # in these families it also puts a bias on the output projection
        or rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
        or _slides(config, window)
    )
    if refused:
        return None
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return Spec(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        theta=float(theta),
        window=window,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _slides(config: Mapping[str, Any], window: int) -> bool:
    """True if some layer sees less than the whole context."""
    span = config.get("sliding_window")
    if span is None or span >= window:
        return False
    if config["model_type"] in ("qwen2", "qwen3"):
        return bool(config.get("use_sliding_window", False))
    return bool(config["model_type"] == "mistral")

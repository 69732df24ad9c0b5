"""Tiny random models of several families, written to folders for the tests of the local backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 260
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "eos_token_id": 257,
    "bos_token_id": 256,
    "pad_token_id": 258,
    "initializer_range": 0.3,
}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama_untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=160,
            eos_token_id=257,
            bos_token_id=256,
            initializer_range=0.3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, three special tokens and one unused id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<none>"])
    role = "{{ 'a' if m['role'] == 'assistant' else m['role'] }}"
    template = f"{{% for m in messages %}}<bos>{role}:{{{{ m['content'] }}}}<eos>{{% endfor %}}<bos>a:"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=template,
    )


def write_model(kind: str, folder: Path) -> Any:
    """Write a model of `kind` with fixed random weights; the transformers module, in float32, is returned."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = FAMILIES[kind]()
        for name, parameter in module.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                # not the trivial 1 and 0, so that a forgotten norm weight or bias shows
                parameter.data += 0.2 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return module.eval()

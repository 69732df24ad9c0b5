"""A tiny random model and the overrides that train it in seconds, through the real command line and all real parts.

The model writes noise, so no rubric parses: `raw_text` hands the text itself to the judge, `uniform` fills the pool
from every group, and fixed phases alternate. Everything else is the real thing.
"""

from __future__ import annotations

from pathlib import Path

PHASES = (3, 2)
STEPS = 12


def write_tiny_model(folder: Path) -> Path:
    """A Llama of about 20,000 parameters with a window that holds the rubric template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from .local_models import SMALL, byte_tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(11)
        config = LlamaConfig(**{**SMALL, "max_position_embeddings": 1600}, tie_word_embeddings=True)
        module = LlamaForCausalLM(config)
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def overrides(model: Path, root: Path, **more: object) -> list[str]:
    """Words for `racelab train`."""
    words: dict[str, object] = {
        "model.source": model,
        "model.train_from_layer": 1,
        "run.root": root,
        "run.threads": 1,
        "run.policy_updates": 1000,
        "run.max_steps": STEPS,
        "method.prompts_per_step": 3,
        "method.entries_per_rubric_step": 2,
        "method.group_size": 4,
        "method.response.max_tokens": 6,
        "method.rubric.max_tokens": 8,
        "method.rubric.on_parse_failure": "raw_text",
        "method.pool.fill": "uniform",
        "method.pool.min_pool": 1,
        "method.pool.min_margin": 0.0,
        "method.phase.mode": "fixed",
        "method.phase.fixed": f"[{PHASES[0]},{PHASES[1]}]",
        "method.routing.d_tri": 0.0,
        "learner.lr": 0.01,
        "data.limit": 6,
        "data.heldout": 4,
        "data.max_prompt_tokens": 400,
        "validation.samples": 2,
        "validation.temperatures": "[1.0,0.5]",
        "judge.calibration_prompts": 4,
        "probe.prompts": 5,
        "probe.group_size": 2,
        "checkpoint.every": 4,
        "tracking": "none",
        **more,
    }
    return [f"{key}={value}" for key, value in words.items()]

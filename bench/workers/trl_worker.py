"""TRL's GRPOTrainer, one step per command. Runs in TRL's own environment; see bench/step.py.

Its best correct setting on CPU: float32 weights under bf16 autocast, fused AdamW, no reference model, no
gradient checkpointing, the whole batch in one pass. The end token is disabled by `min_new_tokens`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from common import PROMPTS, peak_gb, receive, reward, send
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SPENT = {"generate": 0.0}


def timed(cls: Any, name: str) -> None:
    """Add a method's wall time to SPENT."""
    inner = getattr(cls, name)

    @functools.wraps(inner)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(self, *args, **kwargs)
        finally:
            SPENT["generate"] += time.perf_counter() - start

    setattr(cls, name, outer)


class StepByStep(TrainerCallback):
    """Waits for a command before each step and reports after it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Block until told to go on."""
        if receive() is None:
            os._exit(0)
        SPENT["generate"] = 0.0
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step."""
        wall = time.perf_counter() - self.start
        send(wall=wall, cpu=time.process_time() - self.cpu, generate=SPENT["generate"], peak_gb=peak_gb())


def main() -> None:
    """Arguments: model folder, threads, prompts, samples, tokens."""
    folder, threads, prompts, samples, tokens = sys.argv[1], *map(int, sys.argv[2:6])
    sys.stdout = sys.stderr
    torch.set_num_threads(threads)
    timed(GRPOTrainer, "_generate")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = [{"prompt": [{"role": "user", "content": q}]} for q in PROMPTS] * 200
    settings = GRPOConfig(
        output_dir=os.environ["TRL_OUT"],
        per_device_train_batch_size=prompts * samples,
        num_generations=samples,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=1000,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [reward(c[0]["content"]) for c in completions],
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StepByStep()],
    )
    send(ready=True)
    trainer.train()


if __name__ == "__main__":
    main()

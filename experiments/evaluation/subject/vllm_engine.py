"""A model in vLLM, in this process, as the model under test. Only `open_vllm` imports vLLM."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from racelab.configs.schema_eval import SubjectConfig
from racelab.experiments.errors import ConfigError, ModelError
from racelab.experiments.evaluation.subject.local import unfit
from racelab.experiments.evaluation.types import Answer, Ask
from racelab.experiments.rng import derived_seed

_CHUNK = 8  # batches handed over at a time: enough to keep vLLM busy, and answers are recorded between two
_SEEDS = 2**31
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # where the caller has not said
_MEMORY = "VLLM_CPU_KVCACHE_SPACE"  # vLLM's own: GiB for keys and values
_KV_BYTES = 4 << 30  # told nothing, it asks for nearly all of the machine's memory


class VllmSubject:
    """Hands questions to vLLM in chunks; implements `Subject`.

    A question's answers have a seed made from the evaluation's and the question's place, so they do not depend on what
    else is asked, but for the last bits of a logit: how vLLM batches is its own affair.
    """

    def __init__(
        self,
        llm: Any,
        sampling: Callable[..., Any],
        *,
        seed: int,
        batch: int = 16,
        thinking: bool | None = None,
        facts: Mapping[str, Any] | None = None,
        scratch: Path | None = None,
    ) -> None:
        """Keeps the parts.

        Args:
            llm: a `vllm.LLM`.
            sampling: `vllm.SamplingParams`.
            seed: of all answers.
            batch: questions; several batches are handed over at a time.
            thinking: where a question does not say.
            facts: what `describe` says of the model.
            scratch: a folder that is removed at the end.
        """
        self._llm, self._sampling, self._seed = llm, sampling, seed
        self._chunk, self._thinking, self._facts = batch * _CHUNK, thinking, dict(facts or {})
        self._scratch = scratch
        self._tokenizer: Any = llm.get_tokenizer()
        self._window = int(llm.model_config.max_model_len)

    def describe(self) -> dict[str, Any]:
        """What was asked and how (JSON values)."""
        how = {"window": self._window, "seed": self._seed, "thinking": self._thinking}
        return {**self._facts, "engine": "vllm", **how}

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """See the protocol; answers come in the order of `wanted`, a chunk at a time."""
        for start in range(0, len(wanted), self._chunk):
            part = wanted[start : start + self._chunk]
            prompts = {i: self._prompt(asks[i]) for i in part}
            fits = [i for i in part if 0 < len(prompts[i]) < self._window]
            outputs = self._generate(fits, prompts, asks, purpose)
            for i in part:
                if i in outputs:
                    yield i, tuple(_answer(o) for o in sorted(outputs[i].outputs, key=lambda o: o.index))
                else:
                    yield i, unfit(asks[i], len(prompts[i]), self._window)

    def close(self) -> None:
        """Ends vLLM's own processes and removes the scratch folder."""
        llm, self._llm = self._llm, None
        with contextlib.suppress(Exception):  # it ends with this process all the same
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _generate(
        self, fits: Sequence[int], prompts: Mapping[int, list[int]], asks: Sequence[Ask], purpose: str
    ) -> dict[int, Any]:
        if not fits:
            return {}
        params = [self._params(asks[i], len(prompts[i]), i, purpose) for i in fits]
        ids = [{"prompt_token_ids": prompts[i]} for i in fits]
        try:
            outputs = self._llm.generate(ids, params, use_tqdm=False)
        except Exception as error:  # its processes end in many ways
            raise ModelError(
                f"vLLM broke down while it answered {purpose} ({_one_line(error)}); vLLM's own lines above say why; "
                "mend that and resume the evaluation, or start a new one with subject.engine=auto"
            ) from error
        return dict(zip(fits, outputs, strict=True))

    def _params(self, ask: Ask, n_prompt: int, index: int, purpose: str) -> Any:
        return self._sampling(
            n=ask.n,
            max_tokens=min(ask.max_tokens, self._window - n_prompt),
            temperature=ask.temperature,
            top_p=ask.top_p,
            stop=list(ask.stop),
            seed=derived_seed(self._seed, f"eval:{purpose}:{index}") % _SEEDS,
        )

    def _prompt(self, ask: Ask) -> list[int]:
        """Token ids up to where the answer begins, rendered here so that the room for it is known."""
        if ask.layout == "text":
            return self._encode(ask.user)
        if not getattr(self._tokenizer, "chat_template", None):
            return self._encode("\n\n".join(t for t in (ask.system, ask.user) if t) + "\n\n")
        turns = [] if ask.system is None else [{"role": "system", "content": ask.system}]
        turns.append({"role": "user", "content": ask.user})
        thinking = self._thinking if ask.thinking is None else ask.thinking
        how = {} if thinking is None else {"enable_thinking": thinking}
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **how)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def open_vllm(folder: Path, subject: SubjectConfig, seed: int) -> tuple[Any, Callable[..., Any]]:
    """The model of a folder in vLLM, and its class of sampling parameters.

    Raises:
        ConfigError: this vLLM runs on another kind of device than `subject.device`.
        ModelError: vLLM cannot run the model, or not with that window.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    import vllm

    kind = str(current_platform.device_type)
    if subject.device not in ("auto", kind):
        raise ConfigError(
            f"subject.device={subject.device}: the installed vLLM runs on {kind}; set subject.device=auto"
        )
    try:
        llm = vllm.LLM(
            model=str(folder),
            dtype=subject.compute_dtype,
            max_model_len=subject.max_length,
            seed=derived_seed(seed, "eval:vllm") % _SEEDS,
            **(_on_cpu() if kind == "cpu" else {}),
        )
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        raise ModelError(
            f"vLLM cannot open {folder}: {_one_line(error)}; vLLM's own lines above say why. If it is short of memory, "
            f"lower subject.max_length{f' or set {_MEMORY} (GiB)' if kind == 'cpu' else ''}; else set "
            "subject.engine=auto"
        ) from error
    return llm, vllm.SamplingParams


def _on_cpu() -> dict[str, Any]:
    """What vLLM is told on a CPU: its memory, and not to compile, which takes a C++ compiler and minutes."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process fewer to start
    return {"enforce_eager": True, **({} if _MEMORY in os.environ else {"kv_cache_memory_bytes": _KV_BYTES})}


def _answer(output: Any) -> Answer:
    """One of vLLM's completions; a stop string is not part of its text."""
    finished = output.finish_reason == "stop"
    return Answer(str(output.text), finished, n_tokens=len(output.token_ids))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

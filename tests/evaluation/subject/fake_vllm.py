"""The edge of vLLM that `VllmSubject` touches, with replies that show what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeParams:
    """`vllm.SamplingParams`."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: list[str]
    seed: int


class FakeTokenizer:
    """A token per character."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert add_special_tokens is False
        return [ord(c) for c in text]

    def apply_chat_template(
        self, turns: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, **more: Any
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "|".join(f"{t['role']}:{t['content']}" for t in turns) + f"|{more}|"


class FakeLLM:
    """`vllm.LLM`; each answer names prompt, seed and number."""

    def __init__(self, window: int = 200, template: str | None = "x") -> None:
        self.model_config = SimpleNamespace(max_model_len=window)
        self.template, self.calls = template, list[int]()
        self.params: list[FakeParams] = []
        self.prompts: list[str] = []
        self.down = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))

    def _shutdown(self) -> None:
        self.down += 1

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer(self.template)

    def generate(self, prompts: Sequence[Any], params: Sequence[FakeParams], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append(len(prompts))
        self.params += params
        texts = ["".join(map(chr, p["prompt_token_ids"])) for p in prompts]
        self.prompts += texts
        return [
            SimpleNamespace(outputs=[self._output(t, p, k) for k in reversed(range(p.n))])
            for t, p in zip(texts, params, strict=True)
        ]

    def _output(self, text: str, params: FakeParams, index: int) -> Any:
        return SimpleNamespace(
            index=index,
            text=f"{text} {params.seed + index}",
            token_ids=[0] * min(params.max_tokens, 3),
            finish_reason="stop" if params.max_tokens > 3 else "length",
        )

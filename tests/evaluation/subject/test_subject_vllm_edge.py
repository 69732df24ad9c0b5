"""What is handed to vLLM and what is made of its answers; vLLM itself is in `tests/vllm`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError, ModelError
from racelab.experiments.evaluation.subject.vllm_engine import VllmSubject, open_vllm
from racelab.experiments.evaluation.types import Answer, Ask, Subject

from .fake_vllm import FakeLLM, FakeParams
from .worlds import evaluation


def subject(llm: FakeLLM, **more: Any) -> VllmSubject:
    return VllmSubject(llm, FakeParams, **{"seed": 1, "batch": 1, **more})


def test_what_is_answered_does_not_depend_on_what_is_still_wanted() -> None:
    asks = [Ask(f"q{i}", n=1 + i % 2) for i in range(20)]
    llm = FakeLLM()
    assert isinstance(subject(llm), Subject)
    whole = dict(subject(llm).answers(asks, range(20), "p"))
    assert llm.calls == [8, 8, 4]  # handed over in chunks, so that answers are recorded between two
    assert dict(subject(FakeLLM()).answers(asks, [13, 2], "p")) == {i: whole[i] for i in (2, 13)}
    assert len({a.text for answers in whole.values() for a in answers}) == 30
    assert dict(subject(FakeLLM(), seed=2).answers(asks, [0], "p"))[0] != whole[0]


def test_everything_that_an_ask_says_is_handed_over() -> None:
    llm = FakeLLM()
    asks = [
        Ask("q", n=2, max_tokens=50, temperature=0.3, top_p=0.8, system="s", stop=("Q:",), thinking=False),
        Ask("q", max_tokens=999),
        Ask("Q: 1", layout="text"),
    ]
    answers = dict(subject(llm, thinking=True).answers(asks, range(3), "p"))
    assert llm.prompts[0] == "system:s|user:q|{'enable_thinking': False}|"
    assert llm.prompts[1] == "user:q|{'enable_thinking': True}|"
    assert llm.prompts[2] == "Q: 1"
    p = llm.params[0]
    assert (p.n, p.max_tokens, p.temperature, p.top_p, p.stop) == (2, 50, 0.3, 0.8, ["Q:"])
    assert llm.params[1].max_tokens == 200 - len(llm.prompts[1])
    assert [a.text for a in answers[0]] == [f"{llm.prompts[0]} {p.seed + k}" for k in (0, 1)]
    assert answers[0][0].n_tokens == 3


def test_an_answer_that_is_cut_or_does_not_fit() -> None:
    llm = FakeLLM(window=20)
    asks = [Ask("x" * 20, layout="text", n=2), Ask("ab", layout="text", max_tokens=2)]
    answers = dict(subject(llm).answers(asks, [0, 1], "p"))
    why = "prompt of 20 tokens exceeds the window of 20"
    assert answers[0] == (Answer("", finished=False, error=why),) * 2
    assert answers[1][0].finished is False
    assert answers[1][0].n_tokens == 2


def test_without_a_template_the_turns_are_plain_text() -> None:
    llm = FakeLLM(template=None)
    list(subject(llm).answers([Ask("q", system="s")], [0], "p"))
    assert llm.prompts == ["s\n\nq\n\n"]


def test_an_engine_that_breaks_down_is_one_line() -> None:
    class Dead(FakeLLM):
        def generate(self, *args: Any, **more: Any) -> list[Any]:
            raise Exception("EngineCore encountered\nan issue.")

    with pytest.raises(ModelError, match=r"while it answered gsm8k \(EngineCore encountered an issue\.\)"):
        list(subject(Dead()).answers([Ask("q")], [0], "gsm8k"))


def test_closing_ends_the_engine() -> None:
    llm = FakeLLM()
    one = subject(llm)
    one.close()
    one.close()
    assert llm.down == 1


def _install(monkeypatch: pytest.MonkeyPatch, llm: Any) -> None:
    """A module `vllm` of a CPU build; what is set in the environment is set back."""
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    monkeypatch.setattr(vllm, "LLM", llm, raising=False)
    monkeypatch.setattr(vllm, "SamplingParams", FakeParams, raising=False)
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(device_type="cpu"), raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


def test_vllm_is_opened_as_the_config_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given: dict[str, Any] = {}
    _install(monkeypatch, lambda **more: given.update(more) or FakeLLM())
    how = evaluation(tmp_path, subject__max_length=512, subject__compute_dtype="bfloat16").subject
    _, sampling = open_vllm(tmp_path, how, 7)
    assert sampling is FakeParams
    assert 0 <= given.pop("seed") < 2**31
    assert given.pop("kv_cache_memory_bytes") == 4 * 2**30
    assert given.pop("enforce_eager") is True
    assert given == {"model": str(tmp_path), "dtype": "bfloat16", "max_model_len": 512}
    given.clear()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    open_vllm(tmp_path, how, 7)
    assert "kv_cache_memory_bytes" not in given
    cuda = evaluation(tmp_path, subject__device="cuda").subject
    with pytest.raises(ConfigError, match=r"subject\.device=cuda: the installed vLLM runs on cpu"):
        open_vllm(tmp_path, cuda, 7)


def test_what_vllm_cannot_open_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def refuses(**more: Any) -> None:
        raise ValueError("The model's max seq len (131072)\nis larger than the KV cache")

    _install(monkeypatch, refuses)
    with pytest.raises(
        ModelError, match=r"\(131072\) is larger than the KV cache; .* lower subject\.max_length"
    ):
        open_vllm(tmp_path, evaluation(tmp_path).subject, 7)

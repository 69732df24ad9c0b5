"""A model in the real vLLM as the model under test: the same words as this package's own decoding, run or folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from racelab.experiments.errors import ModelError
from racelab.experiments.evaluation.subject.find import find_subject
from racelab.experiments.evaluation.subject.open import open_subject
from racelab.experiments.evaluation.types import Answer, Ask, Subject

from ..evaluation.subject.worlds import evaluation, trained_run
from ..experiments.local_models import SMALL, byte_tokenizer

pytestmark = pytest.mark.vllm

GREEDY = [Ask(f"question {i}", max_tokens=10 + i, temperature=0.0) for i in range(5)]
DRAWN = [Ask(f"question {i}", n=2, max_tokens=8, temperature=1.0) for i in range(4)]


def write_small_model(folder: Path) -> None:
    """A Llama whose heads are as wide as vLLM's attention on a CPU wants them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SMALL, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        module = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=64, tie_word_embeddings=True))
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_small_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    return trained_run(world / "runs", world / "model", {3: 2}).path


@pytest.fixture(scope="module")
def in_vllm(world: Path, trained: Path) -> Iterator[Subject]:
    config = evaluation(trained, subject__engine="vllm", subject__max_length=128)
    subject = open_subject(config, find_subject(config, world), print)
    yield subject
    subject.close()


def greedy(source: Path, world: Path) -> dict[int, tuple[Answer, ...]]:
    config = evaluation(source, subject__max_length=128)
    return dict(open_subject(config, find_subject(config, world), print).answers(GREEDY, range(5), "p"))


def whole_characters(answers: dict[int, tuple[Answer, ...]]) -> list[tuple[str, bool, int]]:
    """Without the halves of characters at the end of a cut answer, which vLLM holds back."""
    return [
        (a.text.rstrip("\ufffd"), a.finished, a.n_tokens)
        for i in sorted(answers)
        for a in answers[i]
        if a.text
    ]


def test_vllm_says_what_the_run_says_and_not_what_its_base_says(
    in_vllm: Subject, world: Path, trained: Path
) -> None:
    given = dict(in_vllm.answers(GREEDY, range(5), "p"))
    assert whole_characters(given) == whole_characters(greedy(trained, world))
    assert whole_characters(given) != whole_characters(greedy(world / "model", world))


def test_sampled_answers_do_not_depend_on_what_is_still_wanted(in_vllm: Subject) -> None:
    whole = dict(in_vllm.answers(DRAWN, range(4), "p"))
    assert dict(in_vllm.answers(DRAWN, [3, 1], "p")) == {i: whole[i] for i in (1, 3)}
    assert all(a != b for a, b in whole.values())
    assert dict(in_vllm.answers(DRAWN, range(4), "other")) != whole


def test_what_does_not_fit_says_so_and_what_is_cut_is_cut(in_vllm: Subject) -> None:
    asks = [Ask("z" * 200, n=2), Ask("a", max_tokens=3), Ask("a", layout="text", max_tokens=400)]
    answers = dict(in_vllm.answers(asks, range(3), "p"))
    assert [a.text for a in answers[0]] == ["", ""]
    assert "exceeds the window of 128" in answers[0][0].error
    assert answers[1][0].finished or answers[1][0].n_tokens == 3
    assert answers[2][0].n_tokens <= 127


def test_a_folder_that_holds_no_model_is_one_line(world: Path, tmp_path: Path) -> None:
    write_small_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["NoSuch"]}')
    config = evaluation(tmp_path, subject__engine="vllm")
    with pytest.raises(ModelError, match="vLLM cannot open"):
        open_subject(config, find_subject(config, world), print)

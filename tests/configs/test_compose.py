"""Composition: every shipped file, every kind of mistake, and the user's own folders."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.configs.compose import PATH_VARIABLE, Composed, compose, read_composed, to_yaml
from racelab.configs.keys import CONFIG_DIR, RACE, RLDS, groups, identity_keys, leaf_keys, section_keys
from racelab.configs.schema import Config, EvolmConfig, RaceConfig
from racelab.configs.sources import read_sources
from racelab.experiments.errors import ConfigError

METHODS, VARIANTS = groups()["method"], groups()["variant"]
PRESETS = ["embedded", "sane", "paper"]
NEEDS = {
    "file": ["data.path=prompts.jsonl"],
    "likelihood": ["probe.redundancy=encoder"],
    "slurm-gpu": ["backend=local"],
}
"""Options with a value that only the user can give, or that fit one choice of another group only."""


@cache
def built(*words: str) -> Composed:
    """A composition that several tests look at."""
    return compose(words)


def flat_values(config: Config) -> dict[str, object]:
    """Dotted key -> value."""

    def walk(value: object, prefix: str) -> dict[str, object]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        return {k: v for name, inner in value.items() for k, v in walk(inner, f"{prefix}{name}.").items()}

    return walk(config.model_dump(mode="json"), "")


def message(*overrides: str, dirs: list[Path] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, dirs or [])
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "+key" not in text
    assert "Hydra" not in text.replace("Hydra's own settings", "")
    return text


# --- what ships ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["embedded", "paper"])
@pytest.mark.parametrize("word", [f"{g}={o}" for g, options in groups().items() for o in options])
def test_every_shipped_option_composes_in_every_preset(word: str, preset: str) -> None:
    group, _, option = word.partition("=")
    overrides = [word] if group == "preset" else [f"preset={preset}", word]
    composed = compose([*overrides, *NEEDS.get(option, [])])
    assert composed.choices[group] == option
    assert Config.model_validate(yaml.safe_load(composed.yaml)) == composed.config


def test_every_yaml_file_is_an_option_of_a_group_or_the_top() -> None:
    files = {path.relative_to(CONFIG_DIR).as_posix() for path in CONFIG_DIR.rglob("*.yaml")}
    files = {file for file in files if not file.startswith(("sweep/", "graph/", "rlds/", "evaluation/"))}
    shared = {"learner/rlds.yaml"}  # an option that RACE's list has too
    options = {f"{group}/{option}.yaml" for group, names in groups().items() for option in names}
    by_method = {f"{preset}/{method}.yaml" for preset in RACE.by_presets for method in groups()["method"]}
    bases = {"embedded/common.yaml", "sane/lengths.yaml"}
    assert shared <= options
    assert files - by_method == options | {"run.yaml"} | bases


def test_the_paper_preset_holds_every_key_but_those_of_other_options() -> None:
    def flat(value: object, prefix: str = "") -> set[str]:
        if not isinstance(value, dict):
            return {prefix.rstrip(".")}
        return set().union(*(flat(inner, f"{prefix}{name}.") for name, inner in value.items()))

    held = [flat(built("preset=paper", f"method={m}").config.model_dump(mode="json")) for m in METHODS]
    for keys in held:
        assert keys <= set(leaf_keys(RACE))
        # Only blocks with several shapes may lack keys: those of the shapes not chosen.
        absent = {key.partition(".")[0] for key in set(leaf_keys(RACE)) - keys}
        assert absent <= {"data", "judge", "launcher", "method"}
    assert {key for key in leaf_keys(RACE) if key.startswith("method.")} <= set().union(*held)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_composes_in_every_preset_and_takes_what_the_preset_sets_for_it(
    preset: str, method: str
) -> None:
    composed = built(f"preset={preset}", f"method={method}")
    assert composed.config.method.name == method
    base = {"embedded": ["sane", "embedded"]}.get(preset, [preset])
    wanted = {p: method for p in base if (CONFIG_DIR / p / f"{method}.yaml").is_file()}
    assert {p: composed.choices[p] for p in RACE.by_presets if composed.choices[p]} == wanted
    assert Config.model_validate(yaml.safe_load(composed.yaml)) == composed.config


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_variant_changes_the_keys_that_its_file_names_and_no_other(preset: str, variant: str) -> None:
    plain = flat_values(built(f"preset={preset}", "method=race").config)
    varied = flat_values(built(f"preset={preset}", f"variant={variant}").config)
    lines = read_sources(CONFIG_DIR / "variant" / f"{variant}.yaml", "variant")
    assert varied["method.variant"] == variant
    assert {key for key in varied if plain[key] != varied[key]} <= {line.key for line in lines if line.text}
    for line in lines:
        if line.text and "$" not in line.text:
            assert varied[line.key] == yaml.safe_load(line.text)


TABLE_16 = {
    ("paper", "short-phases"): (0.20, 10, 5),
    ("paper", "low-quarantine"): (0.10, 25, 12),
    ("sane", "short-phases"): (0.20, 10, 5),
    ("sane", "low-quarantine"): (0.10, 25, 12),
    ("embedded", "short-phases"): (0.25, 2, 4),
    ("embedded", "low-quarantine"): (0.125, 4, 5),
}
"""Printed; in the embedded preset relative to its (0.25, 4, 5) with W = 2:

(q*, 0.4 L* = 1.6 -> 2, max(2W, 0.42 M*) = max(4, 2.1) = 4) and (0.5 q* = 0.125, 4, 5).
"""


@pytest.mark.parametrize(("preset", "variant"), list(TABLE_16))
def test_the_variants_of_table_16_carry_its_numbers(preset: str, variant: str) -> None:
    method = built(f"preset={preset}", f"variant={variant}").config.method
    assert isinstance(method, RaceConfig)
    found = (method.trqc.q_target, method.phase.policy_target, method.phase.rubric_target)
    assert found == TABLE_16[preset, variant]


def test_an_override_beats_the_variant() -> None:
    words = ["variant=low-quarantine", "method.trqc.q_target=0.3"]
    method = compose(words).config.method
    assert isinstance(method, RaceConfig)
    assert (method.variant, method.trqc.q_target) == ("low-quarantine", 0.3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["evolm", "scalar-rm"])
def test_a_variant_of_another_method_is_one_line(variant: str, method: str) -> None:
    assert message(f"variant={variant}", f"method={method}") == (
        f"variant={variant}: an ablation of method=race, not of method={method}; "
        "choose method=race or leave the variant out"
    )


def test_an_override_beats_the_preset_and_a_group_choice_beats_the_presets_choice() -> None:
    config = compose(["preset=paper", "backend=local", "run.policy_updates=7"]).config
    assert config.backend.name == "local"
    assert config.run.policy_updates == 7
    assert config.preset == "paper"


def test_equal_configs_give_equal_text_and_hash_and_other_ones_do_not() -> None:
    first, again = compose([]), compose(["run.seed=0"])
    assert first.yaml == again.yaml
    assert first.sha256 == again.sha256
    assert compose(["run.seed=1"]).sha256 != first.sha256


def test_the_composed_yaml_is_read_back_as_the_same_config(tmp_path: Path) -> None:
    composed = compose(["method.routing.mode=off", "method.rubric.on_parse_failure=nan", "preset=paper"])
    file = tmp_path / "composed.yaml"
    file.write_text(composed.yaml, encoding="utf-8")
    back = read_composed(file)
    assert back.config == composed.config
    assert back.sha256 == composed.sha256


def test_hydra_leaves_no_folder_and_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    compose([])
    assert list(tmp_path.iterdir()) == []
    assert not GlobalHydra.instance().is_initialized()


@settings(max_examples=15, deadline=None)
@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
)
def test_any_name_survives_when_quoted(name: str) -> None:
    """A value in single quotes arrives unchanged, whatever is in it."""
    escaped = name.replace("\\'", "'")
    if escaped.endswith("\\") or "\\" in escaped or "${" in escaped:
        return  # backslashes and interpolations have a meaning of their own in Hydra's grammar
    quoted = escaped.replace("'", "\\'")
    assert compose([f"tracking.experiment='{quoted}'"]).config.tracking.experiment == escaped


# --- mistakes on the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("q_target=0.3", ["q_target=0.3", "did you mean method.trqc.q_target?"]),
        ("trqc.q_target=0.3", ["did you mean method.trqc.q_target?"]),
        ("method.trqc.q_targt=0.3", ["did you mean method.trqc.q_target"]),
        ("fixed=[2,2]", ["did you mean method.phase.fixed?"]),
        ("cycles=2", ["did you mean method.cycles?"]),
        ("prset=paper", ["did you mean preset=paper?"]),
        ("preset=papr", ["no such preset", "did you mean preset=paper?", "embedded, paper, sane"]),
        ("foo", ["foo", "needs a value"]),
        ("papr", ["needs a value", "preset=paper"]),
        ("=3", ["not an override"]),
        ("run.seed = 3", ["not an override"]),
        ("+run.seed=3", ["write run.seed=3 without '+'"]),
        ("++new.key=3", ["cannot be added", "new.key=3"]),
        ("~run.seed", ["cannot be removed", "run.seed=VALUE"]),
        ("~data", ["cannot be removed", "choose one of data=file, "]),
        ("~method.trqc", ["cannot be removed", "set one of its keys, e.g. method.trqc.q_target=VALUE"]),
        ("run.name=a/b", ["run.name: 'a/b' cannot be used"]),
        ("run.name=a..b", ["run.name: 'a..b' cannot be used"]),
        ("run.name=-a", ["run.name: '-a' cannot be used"]),
        ("learner.betas=[1.0,0.999]", ["learner.betas.0=1.0", "less than 1"]),
        ("learner.betas=[0.9,1.0]", ["learner.betas.1=1.0", "less than 1"]),
        ("run=3", ["run is a block of keys", "run.name"]),
        ("hydra.run.dir=x", ["none of Hydra's own settings"]),
        ("run.seed=1,2", ["one run takes one value", "run.seed=[1,2]"]),
        ("run.name=a[b", ["cannot be read", "quote it", "\"'a[b'\""]),
        ("run.seed=-1", ["run.seed=-1", "greater than or equal to 0"]),
        ("run.seed=x", ["run.seed=x", "valid integer"]),
        ("run.seed=true", ["run.seed=true", "must be a number"]),
        ("run.name=3", ["run.name=3", "quote it"]),
        ("method.phase.mode=evnt", ["event, fixed, random", "did you mean event?"]),
        ("method.phase.tau_imp=nan", ["method.phase.tau_imp=nan", "finite"]),
        ("method.rubric_reward.invalid_reward=inf", ["finite"]),
        ("method.phase.window=15", ["method.phase: max_rubric_steps 20 is below 2 x window = 30"]),
        ("method.pool.min_pool=4096", ["above capacity 2048", "take at most 2048"]),
        ("backend.nodes=2", ["backend.nodes=2 needs backend=verl"]),
        ("method.routing={mde: full}", ["method.routing.mde=full", "did you mean method.routing.mode"]),
        ("data.path=x", ["not a key of data=package-tiny", "choose data=file"]),
        ("data=file", ["data.path", "no value", "set data.path=VALUE"]),
        ("validation.temperatures=[1.0,-3]", ["validation.temperatures.1=-3"]),
        ("run.root=${oc.env:RACELAB_TEST_UNSET}", ["RACELAB_TEST_UNSET"]),
    ],
)
def test_each_mistake_is_one_line_with_its_mend(word: str, parts: list[str]) -> None:
    text = message(word)
    assert len(text.splitlines()) == 1
    for part in parts:
        assert part in text


@pytest.mark.parametrize("key", sorted(identity_keys()))
def test_what_a_group_decides_cannot_be_set_alone(key: str) -> None:
    group = identity_keys()[key]
    words = {"task": ["task=frozenlake"], "condition": ["task=frozenlake"], "suite": ["suite=race"]}.get(
        group, []
    )
    assert f"comes with the choice of {group}" in message(*words, f"{key}=x")


def test_several_mistakes_are_several_lines() -> None:
    lines = message("run.seed=-1", "learner.lr=0").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("run.seed=-1:")
    assert lines[1].startswith("learner.lr=0:")


def test_the_word_nan_is_an_option_although_yaml_and_hydra_know_the_number() -> None:
    assert compose(["method.rubric.on_parse_failure=nan"]).config.method.rubric.on_parse_failure == "nan"


@pytest.mark.slow
def test_every_key_can_be_set_and_every_bare_last_part_finds_its_key() -> None:
    for family, words in ((RACE, []), (RLDS, ["task=frozenlake"])):
        for key in leaf_keys(family):
            bare = key.rpartition(".")[2]
            if bare in {*groups((), None), *leaf_keys(), *section_keys()}:
                continue
            homes = [name for name in leaf_keys(family) if name.rpartition(".")[2] == bare]
            text = message(*words, f"{bare}=1")
            assert any(home in text for home in homes), text


# --- the user's own folders ---------------------------------------------------------------------------------


def folder(tmp_path: Path, text: str, name: str = "preset/mine.yaml") -> Path:
    file = tmp_path / "my configs" / name
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    return tmp_path / "my configs"


MINE = "# @package _global_\ndefaults:\n  - sane\npreset: mine\nmethod:\n  trqc:\n    q_target: 0.4\n"


def test_a_users_preset_is_found_by_option_and_by_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = folder(tmp_path, MINE)
    assert compose(["preset=mine"], [mine]).config.method.trqc.q_target == 0.4
    monkeypatch.setenv(PATH_VARIABLE, str(mine))
    assert compose(["preset=mine"]).config.method.trqc.q_target == 0.4


def test_a_preset_that_builds_on_embedded_keeps_what_embedded_sets_for_the_method(tmp_path: Path) -> None:
    head = "# @package _global_\ndefaults:\n  - embedded\n"
    mine = folder(tmp_path, f"{head}preset: mine\nrun:\n  seed: 5\n")
    (mine / "preset" / "evo.yaml").write_text(
        f"{head}  - override /method: evolm\n  - _self_\npreset: evo\nmethod:\n  group_size: 4\n",
        encoding="utf-8",
    )
    composed = compose(["preset=mine"], [mine])
    own = compose(["preset=embedded", "run.seed=5"])
    assert composed.config.model_copy(update={"preset": "embedded"}) == own.config
    assert [composed.choices[p] for p in ("sane", "embedded", "paper")] == ["race", "race", None]
    for words in (["preset=mine", "method=evolm"], ["preset=evo"]):
        composed = compose(words, [mine])
        assert isinstance(composed.config.method, EvolmConfig)
        assert composed.config.method.fixed == (3, 3)
        assert composed.config.method.prompts_per_step == 6
        assert [composed.choices[p] for p in ("sane", "embedded", "paper")] == ["evolm", "evolm", None]
    assert composed.config.method.group_size == 4


def test_a_missing_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--config-dir" in message(dirs=[tmp_path / "none"])
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "none"))
    assert PATH_VARIABLE in message()


def test_a_file_with_a_shipped_name_is_an_error(tmp_path: Path) -> None:
    text = message(dirs=[folder(tmp_path, MINE, "preset/paper.yaml")])
    assert "rename your file" in text
    assert "paper.yaml" in text


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("    q_targt: 0.4", "did you mean method.trqc.q_target"),
        ("    q_target: 4", "less than 1"),
        ("  routing:\n    mode: off", 'write "off" in quotes'),
    ],
)
def test_a_mistake_in_a_users_file_names_file_and_line(tmp_path: Path, line: str, part: str) -> None:
    head = "# @package _global_\ndefaults:\n  - sane\npreset: mine\nmethod:\n"
    body = line if line.startswith("  routing") else f"  trqc:\n{line}"
    mine = folder(tmp_path, head + body + "\n")
    text = message("preset=mine", dirs=[mine])
    assert f"{mine / 'preset' / 'mine.yaml'}:7" in text
    assert part in text
    assert len(text.splitlines()) == 1


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    mine = folder(tmp_path, "# @package _global_\nmethod:\n  - a\n b: [\n")
    text = message("preset=mine", dirs=[mine])
    assert "mine.yaml:4" in text
    assert "not valid YAML" in text
    assert "no such key; did you mean method.trqc.q_target?" in message(
        "preset=mine", "q_target=1", dirs=[mine]
    )


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"# @package _global_\na: \x07\n", "characters that are not text"),
        (b"", "empty; write `# @package _global_`"),
        (b"# @package _global_\n- a\n", "holds a list, not keys"),
        (b"preset: mine\n", "make `# @package _global_` its first line"),
        (b"# a word first\n# @package _global_\npreset: mine\n", "make `# @package _global_` its first line"),
        (b"# @package _global_\ndefaults: [mine]\npreset: mine\n", "lead back to itself (mine -> mine)"),
    ],
)
def test_a_users_file_that_cannot_be_merged_is_named(tmp_path: Path, body: bytes, part: str) -> None:
    mine = folder(tmp_path, "")
    (mine / "preset" / "mine.yaml").write_bytes(body)
    text = message("preset=mine", dirs=[mine])
    assert text.startswith(f"{mine / 'preset' / 'mine.yaml'}: ")
    assert part in text
    assert len(text.splitlines()) == 1
    assert compose(["preset=sane"], [mine]).config.preset == "sane"  # a file that is not chosen harms nobody


def test_presets_that_lead_to_each_other_are_named(tmp_path: Path) -> None:
    head = "# @package _global_\npreset: mine\n"
    mine = folder(tmp_path, f"{head}defaults: [yours]\n")
    (mine / "preset" / "yours.yaml").write_text(f"{head}defaults: [mine]\n", encoding="utf-8")
    assert "lead back to itself (mine -> yours -> mine)" in message("preset=mine", dirs=[mine])


def test_a_file_of_another_group_is_looked_at_too(tmp_path: Path) -> None:
    """Reached by the word itself, and through a preset's defaults."""
    mine = folder(tmp_path, "", "data/own.yaml")
    assert f"{mine / 'data' / 'own.yaml'}: empty" in message("data=own", dirs=[mine])
    (mine / "preset").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /data: own\npreset: mine\n"
    (mine / "preset" / "mine.yaml").write_text(text, encoding="utf-8")
    assert f"{mine / 'data' / 'own.yaml'}: empty" in message("preset=mine", dirs=[mine])


def test_a_deleted_current_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder has been deleted" in message()


def test_a_composed_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "composed.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"composed\.yaml: not UTF-8"):
        read_composed(tmp_path / "composed.yaml")


# --- what is imported ---------------------------------------------------------------------------------------


def test_composing_loads_nothing_heavy() -> None:
    code = (
        "import sys; from racelab.configs.compose import compose; "
        "from racelab.configs.check import reachability; reachability(compose([]).config); "
        "heavy = ('torch', 'mlflow', 'transformers', 'pandas', 'pyarrow', 'numpy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_itself_loads_no_hydra() -> None:
    code = (
        "import sys, racelab.configs.compose; "
        "print([m for m in ('hydra', 'omegaconf', 'pydantic_settings') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_yaml_of_a_config_keeps_the_order_of_the_schema() -> None:
    keys = list(yaml.safe_load(to_yaml(compose([]).config)))
    assert keys == list(Config.model_fields)


def test_a_run_of_an_older_schema_can_be_looked_at_but_not_gone_on_with(tmp_path: Path) -> None:
    """Two keys are taken out, one of them inside a block of a union; what stands there stays as it is."""
    file = tmp_path / "composed.yaml"
    whole = compose(["method=evolm", "method.buffer.capacity=7", "validation.rubric_temperature=0.5"])
    raw = yaml.safe_load(whole.yaml)
    del raw["validation"]["rubric_temperature"], raw["method"]["buffer"]["min_age"]
    file.write_text(yaml.safe_dump(raw))
    config = read_composed(file, to_look=True).config
    assert config.validation.rubric_temperature == compose([]).config.validation.rubric_temperature
    assert isinstance(config.method, EvolmConfig)
    assert (config.method.buffer.capacity, config.method.buffer.min_age) == (7, 0)
    with pytest.raises(
        ConfigError, match=r"written by an older racelab, before there was method\.buffer\.min_age"
    ):
        read_composed(file)
    raw["method"]["nonsense"] = 1
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="nonsense"):
        read_composed(file, to_look=True)

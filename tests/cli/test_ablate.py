"""`racelab ablate` and `racelab baseline`: which cells they have, and what is wrong with a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.cli import ablate, baseline
from racelab.configs.compose import compose
from racelab.configs.keys import groups

Call = Callable[..., Any]
DRY = ("--dry-run", "--json")


NUMBERS = {
    "random-phase-length": "random-phase-length-L",
    "fixed-50-50": "fixed-50-50-3+3",
    "short-phases": "short-phases-q",
    "low-quarantine": "low-quarantine-q",
}


def labels(found: Any) -> list[str]:
    return [row["label"] for row in found.json()]


def test_all_variants_come_in_the_order_of_the_papers_tables(call: Call) -> None:
    found = call("ablate", "--variant", "all", "--seeds", "0,1", *DRY)
    assert found.code == 0, found.err
    shown = labels(found)[::2]
    assert len(shown) == len(ablate.ORDER)
    for label, name in zip(shown, ablate.ORDER, strict=True):
        assert label.startswith(NUMBERS[name]) if name in NUMBERS else label == name
    assert [row["seed"] for row in found.json()] == [0, 1] * 9
    first = found.json()[2]
    assert first["overrides"] == ["variant=no-gradient-filtering", "run.seed=0"]
    assert first["status"] == "new"
    assert first["cell"] == first["run_id"]


def test_all_baselines_are_every_method_but_race(call: Call) -> None:
    found = call("baseline", "--method", "all", *DRY)
    assert found.code == 0, found.err
    assert labels(found) == list(baseline.ORDER)
    assert set(labels(found)) == set(groups()["method"]) - {"race"}


def test_single_ones_come_as_they_are_named_and_once(call: Call) -> None:
    words = ["--variant", "filter-only", "--variant", "full", "--variant", "filter-only"]
    assert labels(call("ablate", *words, *DRY)) == ["filter-only", "full"]
    assert labels(call("baseline", "--method", "rar", *DRY)) == ["rar"]


def test_overrides_reach_every_cell_and_change_its_name(call: Call) -> None:
    plain = call("ablate", "--variant", "full", *DRY).json()
    other = call("ablate", "--variant", "full", *DRY, "run.policy_updates=9").json()
    same = call("ablate", "--variant", "full", *DRY, "checkpoint.every=9", "tracking=none").json()
    assert other[0]["overrides"] == ["run.policy_updates=9", "variant=full"]
    assert other[0]["cell"] != plain[0]["cell"] == same[0]["cell"]


def test_a_users_variant_and_method_follow_the_papers(call: Call, home: Path) -> None:
    (home / "mine" / "variant").mkdir(parents=True)
    text = "# @package method\nvariant: full\ntrqc:\n  q_target: 0.4\n"
    (home / "mine" / "variant" / "gentle.yaml").write_text(text)
    found = call("ablate", "--variant", "all", "--config-dir", str(home / "mine"), *DRY)
    assert labels(found)[-1] == "gentle"
    assert len(labels(found)) == len(ablate.ORDER) + 1


PAPER = {
    "fixed-50-50": "fixed-50-50-50+50",
    "short-phases": "short-phases-q0.2-L10-M5",
    "low-quarantine": "low-quarantine-q0.1-L25-M12",
    "full": "full",
}


@pytest.mark.parametrize("variant", PAPER)
def test_a_label_shows_the_numbers_that_the_variant_uses(variant: str) -> None:
    """In the paper preset: Table 6 and Table 16."""
    config = compose(["preset=paper", f"variant={variant}"]).config
    assert ablate.with_numbers(variant, config) == PAPER[variant]


def test_the_numbers_stand_in_the_name_and_not_in_the_id(call: Call) -> None:
    (row,) = call("ablate", "--variant", "fixed-50-50", *DRY, "method.phase.fixed=[2,4]").json()
    assert row["label"] == "fixed-50-50-2+4"
    assert row["cell"].startswith("fixed-50-50-s0-")


@pytest.mark.parametrize(
    ("variant", "word", "key"),
    [
        ("static-thresholds", "method.trqc.eta_sigma=0.05", "method.trqc.eta_sigma"),
        ("static-thresholds", "+method.phase.eta_policy=0.1", "method.phase.eta_policy"),
        ("static-thresholds", "method.trqc={eta_tau:0.05}", "method.trqc"),
        ("fixed-50-50", "method.phase.mode=event", "method.phase.mode"),
        ("all", "method.trqc.q_target=0.3", "method.trqc.q_target"),
        ("full", "method.variant=mine", "method.variant"),
    ],
)
def test_a_word_may_not_undo_what_the_variant_is_named_for(
    call: Call, variant: str, word: str, key: str
) -> None:
    found = call("ablate", "--variant", variant, "--dry-run", word)
    assert found.code == 2
    name = "short-phases" if variant == "all" else variant
    assert f"{word}: the variant {name} sets {key} itself" in found.err
    assert "`racelab sweep`" in found.err


@pytest.mark.parametrize(
    ("variant", "word"),
    [
        ("filter-only", "method.phase.mode=fixed"),
        ("filter-only", "method.pool.fill=uniform"),
        ("fixed-50-50", "method.phase.fixed=[2,2]"),
        ("low-quarantine", "method.sensitivity.low_quarantine.q_target=0.3"),
        ("static-thresholds", "method.trqc.q_target=0.3"),
        ("full", "method=race"),
    ],
)
def test_a_word_that_the_variant_leaves_open_is_fine(call: Call, variant: str, word: str) -> None:
    found = call("ablate", "--variant", variant, *DRY, word)
    assert found.code == 0, found.err


def test_a_users_variant_may_not_be_undone_either(call: Call, home: Path) -> None:
    (home / "mine" / "variant").mkdir(parents=True)
    text = "# @package method\nvariant: full\ntrqc:\n  q_target: 0.4\n"
    (home / "mine" / "variant" / "gentle.yaml").write_text(text)
    words = ["--variant", "gentle", "--config-dir", str(home / "mine"), "method.trqc.q_target=0.3"]
    assert "the variant gentle sets method.trqc.q_target" in call("ablate", *words, "--dry-run").err


BAD = {
    "no variant": (["ablate"], "--variant is missing; name one of full, no-gradient-filtering"),
    "unknown variant": (["ablate", "--variant", "static-treshold"], "did you mean static-thresholds?"),
    "unknown method": (["baseline", "--method", "evolv"], "did you mean evolm?"),
    "race is no baseline": (["baseline", "--method", "race"], "no method 'race'"),
    "variant twice": (["ablate", "--variant", "full", "variant=full"], "write --variant full"),
    "seed twice": (["ablate", "--variant", "full", "--seeds", "0", "run.seed=1"], "leave one of them out"),
    "bad seeds": (["ablate", "--variant", "full", "--seeds", "0,x"], "--seeds '0,x' is no list"),
    "seed named twice": (["ablate", "--variant", "full", "--seeds", "1,1"], "names a seed twice"),
    "resume and fresh": (["ablate", "--variant", "full", "--resume", "--fresh"], "leave one of them out"),
    "nothing to resume": (["ablate", "--variant", "full", "--resume", "tracking=none"], "has been started"),
    "no jobs": (["ablate", "--variant", "full", "--jobs", "0"], "--jobs"),
    "unknown key": (["ablate", "--variant", "all", "method.grup_size=4"], "did you mean method.group_size"),
    "missing data": (
        ["ablate", "--variant", "full", "data=file", "data.path=no.jsonl"],
        "cell full (seed 0): ",
    ),
    "missing model": (["ablate", "--variant", "all", "model.source=./none"], "cell full (seed 0): "),
    "jobs without seeds": (["train", "--jobs", "2"], "add --seeds"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_command_line_is_one_line_and_starts_nothing(call: Call, home: Path, case: str) -> None:
    words, part = BAD[case]
    found = call(*words)
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert found.code == 2, found.err
    assert len(errors) == 1
    assert part in errors[0]
    assert not (home / "runs").exists()


def test_one_cell_that_cannot_run_keeps_all_from_starting(call: Call, home: Path) -> None:
    """Only one of the two cells is wrong, and it is the last."""
    grid = home / "grid.yaml"
    grid.write_text("name: g\naxes: {data.limit: [12, 2]}\nbase: [tracking=none]\n")
    found = call("sweep", str(grid))
    assert found.code == 2
    assert "data.limit=2 is below method.prompts_per_step" in found.err
    assert not (home / "runs").exists()


def test_what_cannot_be_reached_is_said_once(call: Call) -> None:
    found = call(
        "ablate", "--variant", "all", "--seeds", "0,1,2", "--dry-run", "method.trqc.calibrate_steps=99"
    )
    lines = [
        line
        for line in found.err.splitlines()
        if "method.trqc.calibrate_steps=99" in line and "works" in line
    ]
    assert len(lines) == 1
    assert lines[0].endswith("(in full, no-gradient-filtering, uniform-rubric-sampling and 6 more)")


def test_a_dry_run_for_people_shows_what_differs(call: Call) -> None:
    found = call("ablate", "--variant", "full", "--variant", "filter-only", "--dry-run", "tracking=none")
    rows = [line.split() for line in found.out.splitlines()]
    assert rows[0] == ["cell", "label", "seed", "status", "own", "overrides"]
    assert [(row[1], row[2], row[3], row[4]) for row in rows[1:]] == [
        ("full", "0", "new", "variant=full"),
        ("filter-only", "0", "new", "variant=filter-only"),
    ]
    assert "all cells: tracking=none" in found.err


@pytest.mark.parametrize("dry_run", [False, True])
def test_prompts_are_loaded_once_per_seed_whatever_the_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """Three variants and two seeds: two loads, as far as data is concerned."""
    from racelab.experiments import build
    from racelab.experiments.data import load
    from racelab.sweeps.cells import Spec, make_cells
    from racelab.sweeps.inputs import check_inputs

    seeds: list[int] = []
    real = load.load_prompts

    def counted(data: Any, seed: int) -> Any:
        seeds.append(seed)
        return real(data, seed)

    monkeypatch.setattr(build, "load_prompts", counted)
    monkeypatch.setattr(load, "load_prompts", counted)
    monkeypatch.setattr(build, "resolve_model", lambda source, **more: tmp_path)
    names = ("full", "filter-only", "fixed-50-50")
    cells = make_cells([Spec(name, seed, (f"variant={name}",)) for name in names for seed in (0, 1)])
    check_inputs(cells, tmp_path, dry_run)
    assert seeds == [0, 1]


def test_what_each_method_needs_is_asked_though_the_prompts_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from racelab.experiments import build
    from racelab.experiments.errors import DataError
    from racelab.sweeps.cells import Spec, make_cells
    from racelab.sweeps.inputs import check_inputs

    monkeypatch.setattr(build, "resolve_model", lambda source, **more: tmp_path)
    pairs = ("method.pairs=package", "method.pairs=none.jsonl")
    cells = make_cells([Spec(word, 0, ("method=rubric-arm", word)) for word in pairs])
    with pytest.raises(DataError, match=r"cell method\.pairs=none\.jsonl \(seed 0\): .*no such file"):
        check_inputs(cells, tmp_path, dry_run=False)

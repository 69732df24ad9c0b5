"""From a graph file to stages in order, with every mistake named by its line, and from stages to batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.cli.launch_words import Planner, makes_runs
from racelab.configs.keys import CONFIG_DIR, groups
from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import ConfigError
from racelab.sweeps.slurm.graph import Graph, fill, read_graph
from racelab.sweeps.slurm.model import After, Task
from racelab.sweeps.slurm.runs import Todo
from racelab.sweeps.slurm.stages import Planned, command_launcher, graph_batches, plan_stages
from racelab.sweeps.slurm.status import TaskStatus

GRAPH = """\
name: nightly
base: [preset=embedded, run.policy_updates=2, launcher=slurm]
stages:
  report:
    command: runs --limit 5
    after_any: [train, look]
    every_node: true
  train:
    command: train run.seed=3
  look:
    command: replay {train} --no-plot
    after: [train]
    launcher: [launcher.partition=gpu, launcher.time_min=30]
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "graph.yaml"
    file.write_text(text)
    return file


def read(folder: Path, text: str) -> Graph:
    return read_graph(write(folder, text), makes_runs)


def refusal(folder: Path, text: str) -> str:
    """What the reader says, without the file's name."""
    with pytest.raises(ConfigError) as error:
        read(folder, text)
    return str(error.value).removeprefix(str(folder / "graph.yaml"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACELAB_HOME", str(tmp_path))
    return tmp_path


def plan(folder: Path, text: str, *more: str) -> dict[str, Planned]:
    graph = read(folder, text)
    return {p.stage.name: p for p in plan_stages(graph, Planner(()), more)}


# --- reading ------------------------------------------------------------------------------------------------


def test_stages_come_behind_those_they_wait_for_else_as_in_the_file(tmp_path: Path) -> None:
    graph = read(tmp_path, GRAPH)
    assert graph.name == "nightly"
    assert graph.base == ("preset=embedded", "run.policy_updates=2", "launcher=slurm")
    train, look, report = graph.stages
    assert (train.name, train.words, train.waits, train.makes_runs) == (
        "train", ("train", "run.seed=3"), (), True,
    )  # fmt: skip
    assert (look.name, look.words, look.waits, look.makes_runs) == (
        "look", ("replay", "{train}", "--no-plot"), (After("train", "ok"),), False,
    )  # fmt: skip
    assert look.launcher == ("launcher.partition=gpu", "launcher.time_min=30")
    assert report.waits == (After("train", "any"), After("look", "any"))
    assert (report.every_node, look.every_node) == (True, False)
    assert look.place == f"{tmp_path}/graph.yaml:11: stages: look: command"


@given(data=st.data())
def test_any_graph_without_a_cycle_is_put_in_an_order_that_respects_every_wait(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A wait leads from a higher number to a lower one only, so there is no cycle; the file has any order."""
    count = data.draw(st.integers(1, 7))
    waits = {n: data.draw(st.sets(st.integers(0, n - 1)) if n else st.just(set())) for n in range(count)}
    shuffled = data.draw(st.permutations(range(count)))
    text = "name: g\nstages:\n"
    for n in shuffled:
        listed = ", ".join(f"s{other}" for other in sorted(waits[n]))
        text += f"  s{n}: {{command: runs, after: [{listed}]}}\n"
    stages = [int(stage.name[1:]) for stage in read(tmp_path_factory.mktemp("g"), text).stages]
    assert sorted(stages) == list(range(count))
    assert all(stages.index(other) < stages.index(n) for n in waits for other in waits[n])
    if not any(waits.values()):
        assert stages == list(shuffled)


def test_braces_that_hold_no_name_are_left_alone(tmp_path: Path) -> None:
    """Values of overrides may be blocks and references to other keys."""
    text = "name: g\nstages: {train: {command: 'train method.trqc={eta_sigma:0.05} run.name=${preset}'}}\n"
    (stage,) = read(tmp_path, text).stages
    assert stage.words == ("train", "method.trqc={eta_sigma:0.05}", "run.name=${preset}")
    assert fill(stage.words, {}) == stage.words
    assert fill(("a={train}/{train}", "${train}"), {"train": "id"}) == ("a=id/id", "${train}")


def test_quotes_hold_a_word_together(tmp_path: Path) -> None:
    text = "name: g\nstages: {t: {command: \"train 'run.name=two words'\"}}\n"
    (stage,) = read(tmp_path, text).stages
    assert stage.words == ("train", "run.name=two words")


def stages(*lines: str) -> str:
    return "\n".join(["name: g", "stages:", *(f"  {line}" for line in lines), ""])


TRAIN = "train: {command: train}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": holds no keys; a graph has name, base, stages"),
        ("stages: {a: {command: train}}\n", ": name: is missing; a graph needs a name"),
        ("name: a/b\nstages: {a: {command: train}}\n", ":1: name: 'a/b' is no name; take letters"),
        ("name: g\n", ": stages: the graph has no stages; write a name and a command"),
        ("name: g\nstages: {}\n", ":2: stages: the graph has no stages"),
        ("name: g\nstages: [train]\n", ":2: stages: the graph has no stages"),
        ("name: g\nstage:\n  train: 1\n", ":2: stage: no such key; did you mean stages? (known: name, base, stages)"),
        ("name: g\nbase: [preset]\nstages: {a: {command: train}}\n", ":2: base: must be a list of overrides"),
        ("name: 2026-13-01\n", ": holds a value that is none (month must be in 1..12); put quotes around it"),
        ("name: g\nname: h\n", ":2: name: stands twice, first in line 1; remove one"),
        (stages(TRAIN, TRAIN), ":4: stages: train: stands twice, first in line 3; remove one"),
        (stages("a: {command: train, command: runs}"), ":3: stages: a: command: stands twice, first in line 3"),
        (stages("a: {command: train"), ":4: not valid YAML"),
        (stages("on: {command: train}"), ": stages: True: the name of a stage is a text; put quotes around on"),
        (stages("1: {command: train}"), ":3: stages: 1: the name of a stage is a text"),
        (stages("a b: {command: train}"), ":3: stages: a b: no name for a stage; take letters, digits, _ and -"),
        (stages("a.b: {command: train}"), ":3: stages: a.b: no name for a stage"),
        (stages(TRAIN, "train-2: {command: runs}"), ":4: stages: train-2: the parts of a large stage train have"),
        (stages("a: train"), ":3: stages: a: a stage is keys, as {command: train run.seed=0}"),
        (stages("a: {comand: train}"), ":3: stages: a: comand: no such key; did you mean command? (known: command, "
            "after, after_any, launcher, every_node)"),
        (stages("a: {after: []}"), ": stages: a: command: is missing; write a command line of racelab"),
        (stages("a: {command: [train]}"), ":3: stages: a: command: must be a command line of racelab"),
        (stages("a: {command: ' '}"), ":3: stages: a: command: must be a command line of racelab"),
        (stages("a: {command: train 'run.name}"), ":3: stages: a: command: cannot be split into words (no closing "
            "quotation); close the quotes"),
        (stages("a: {command: train, every_node: 1}"), ":3: stages: a: every_node: must be true or false"),
        (stages("a: {command: train, every_node: true}"), ":3: stages: a: every_node: is for commands that make no "
            "runs, not for train; leave it out"),
        (stages("a: {command: train, launcher: [preset=paper]}"), ":3: stages: a: launcher: preset=paper is no key of "
            "the launcher; it belongs into the stage's command"),
        (stages("a: {command: train, launcher: launcher=slurm}"), ":3: stages: a: launcher: must be a list of"),
        # waits
        (stages(TRAIN, "a: {command: runs, after: train}"), ":4: stages: a: after: must be a list of stages"),
        (stages(TRAIN, "a: {command: runs, after: [trian]}"), ":4: stages: a: after: no stage trian; did you mean "
            "train?"),
        (stages(TRAIN, "a: {command: runs, after_any: [q]}"), ":4: stages: a: after_any: no stage q (stages: train)"),
        (stages("a: {command: runs, after: [a]}"), ":3: stages: a: after: a stage cannot wait for itself"),
        (stages(TRAIN, "a: {command: runs, after: [train, train]}"), ":4: stages: a: after: train stands twice"),
        (stages(TRAIN, "a: {command: runs, after: [train], after_any: [train]}"), ":4: stages: a: after_any: train "
            "stands in after and in after_any; leave one of them out"),
        # references
        (stages(TRAIN, "a: {command: 'show {trian}', after: [train]}"), ":4: stages: a: command: {trian}: no stage "
            "trian; did you mean train?"),
        (stages(TRAIN, "a: {command: 'show {train}'}"), ":4: stages: a: command: {train} is used, but the stage does "
            "not wait for train; add after: [train]"),
        (stages("a: {command: 'train run.name={a}'}"), ":3: stages: a: command: {a} is used, but the stage does not "
            "wait for a"),
        (stages("a: {command: runs}", "b: {command: 'show {a}', after: [a]}"), ":4: stages: b: command: {a}: the "
            "stage a makes no runs, so there is no id of one"),
        # the command line
        (stages("a: {command: trian}"), ":3: stages: a: command: no such command trian; did you mean train? (known: "),
        (stages("a: {command: evaluation x}"), ":3: stages: a: command: no such command evaluation (known: train, "),
        (stages("a: {command: config}"), ":3: stages: a: command: no command of config stands first (known: show, "),
        (stages("a: {command: config shwo}"), ":3: stages: a: command: no such command config shwo; did you mean "
            "show?"),
        (stages("a: {command: --debug train}"), ":3: stages: a: command: no command stands first (known: "),
        (stages("a: {command: racelab train}"), ":3: stages: a: command: write the words that come after racelab"),
        (stages("a: {command: train --sed 1}"), ":3: stages: a: command: no such option: --sed"),
        (stages("a: {command: show}"), ":3: stages: a: command: missing argument 'RUN' (see racelab show --help)"),
        (stages("a: {command: show x --step one}"), ":3: stages: a: command: invalid value for '--step'"),
        (stages("a: {command: train --help}"), ":3: stages: a: command: train --help asks for help only"),
        (stages("a: {command: ui}"), ":3: stages: a: command: ui cannot be a stage: it goes on until somebody stops"),
        (stages("a: {command: serve retriever --corpus x}"), ":3: stages: a: command: serve cannot be a stage"),
        (stages("a: {command: train --dry-run}"), ":3: stages: a: command: --dry-run cannot stand in a stage"),
        (stages("a: {command: train --json}"), ":3: stages: a: command: --json cannot stand in a stage"),
        (stages("a: {command: train --resume latest}"), ":3: stages: a: command: --resume cannot stand in a stage"),
        (stages("a: {command: ablate --variant all --resume}"), ":3: stages: a: command: --resume cannot stand"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(said)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("waits", "chain"),
    [
        ({"a": "b", "b": "a"}, "a waits for b, which waits for a"),
        ({"a": "b", "b": "c", "c": "a"}, "a waits for b, which waits for c, which waits for a"),
        ({"x": "", "a": "x", "b": "c", "c": "d", "d": "c"}, "c waits for d, which waits for c"),
    ],
)
def test_a_cycle_is_named(tmp_path: Path, waits: dict[str, str], chain: str) -> None:
    text = stages(*(f"{name}: {{command: runs, after: [{other}]}}" for name, other in waits.items()))
    assert f": the stages wait for one another: {chain}; leave one of the waits out" in refusal(
        tmp_path, text
    )


def test_a_stage_may_use_the_id_of_one_that_it_waits_for_through_another(tmp_path: Path) -> None:
    text = stages(TRAIN, "a: {command: runs, after_any: [train]}", "b: {command: 'show {train}', after: [a]}")
    assert [stage.name for stage in read(tmp_path, text).stages] == ["train", "a", "b"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_said_so(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "graph.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read" if content is None else "not UTF-8 text"):
        read_graph(file, makes_runs)


# --- planning -----------------------------------------------------------------------------------------------


def words_of(planned: Planned) -> list[str]:
    assert planned.runs is not None
    return list(planned.runs.plan.cells[0].overrides)


def test_the_words_of_a_stage_stand_above_the_base_and_those_of_the_command_line_above_both(
    home: Path,
) -> None:
    text = """\
name: g
base: [preset=embedded, run.policy_updates=2, run.seed=1, launcher.cpus_per_task=3, launcher=slurm]
stages:
  train:
    command: train run.seed=3 learner.lr=0.5
    launcher: [launcher.time_min=40]
  look:
    command: show {train}
    after: [train]
    launcher: [launcher.mem_gb=2]
"""
    stages = plan(home, text, "learner.lr=0.25", "launcher.partition=cpu")
    assert words_of(stages["train"]) == [
        "preset=embedded", "run.policy_updates=2", "launcher.cpus_per_task=3", "launcher=slurm", "run.seed=3",
        "launcher.time_min=40", "learner.lr=0.25", "launcher.partition=cpu",
    ]  # fmt: skip
    runs, look = stages["train"].runs, stages["look"]
    assert runs is not None
    (cell,) = runs.plan.cells
    assert (cell.seed, cell.config.learner.lr) == (3, 0.25)
    launcher = cell.config.launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    assert (launcher.cpus_per_task, launcher.time_min, launcher.partition) == (3, 40, "cpu")
    assert isinstance(look.launcher, SlurmLauncherConfig)
    assert (look.launcher.cpus_per_task, look.launcher.mem_gb, look.launcher.partition) == (3, 2.0, "cpu")
    assert (look.launcher.nodes, look.launcher.gpus_per_node, look.launcher.time_min) == (1, 0, 240)


def test_ids_are_those_that_the_runs_will_have(home: Path) -> None:
    """A lone `train` stands for its run, every other stage for its sweep; elsewhere than in the usual folder, paths."""
    text = """\
name: g
base: [preset=embedded, launcher=slurm]
stages:
  one: {command: train run.seed=4}
  two: {command: "train --seeds 1,2"}
  abl: {command: "ablate --variant full"}
  show1: {command: "show {one}", after: [one]}
  show2: {command: "show {two}", after: [two]}
  show3: {command: "show {abl}", after: [abl]}
"""
    stages = plan(home, text)
    one, two, abl = (stages[name].runs for name in ("one", "two", "abl"))
    assert one is not None
    assert two is not None
    assert abl is not None
    assert one.single
    assert stages["show1"].words == ("show", one.plan.cells[0].cell_id)
    assert one.plan.run_ids == (one.plan.cells[0].cell_id,)
    assert stages["show2"].words == ("show", two.plan.run_id)
    assert two.plan.run_id.startswith("sweep-")
    assert len(two.plan.run_ids) == 2
    assert stages["show3"].words == ("show", abl.plan.run_id)
    elsewhere = plan(home, text, f"run.root={home / 'else'}")
    assert elsewhere["show1"].words == ("show", str(home / "else" / one.plan.run_ids[0]))
    assert not (home / "runs").exists(), "planning makes nothing"


def test_the_command_line_of_a_stage_for_this_machine_has_the_words_of_the_graph(home: Path) -> None:
    text = "base: [preset=embedded]\nstages:\n  a: {command: ablate --variant full --fresh run.seed=2 --jobs 2}\n"
    stages = plan(home, f"name: g\n{text}", "run.policy_updates=3")
    assert stages["a"].command == (
        "racelab ablate --variant full --jobs 2 preset=embedded run.seed=2 run.policy_updates=3 --fresh"
    )
    assert not stages["a"].on_slurm


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("base: [learner.lr=1]\nstages: {a: {command: runs}}", [],
            ": no stage makes runs, so learner.lr=1 means nothing; leave it out"),
        ("stages: {a: {command: runs}}", ["run.seed=1"], ": no stage makes runs, so run.seed=1 means nothing"),
        ("base: [launcher=slurm]\nstages: {a: {command: train launcher=inline}, b: {command: runs}}", [],
            ":3: stages: a: command: the stage would run on this machine, and b as a job; write launcher=slurm into"),
        ("stages: {a: {command: train}, b: {command: train}}", [],
            ":2: stages: b: command: the run race-full-embedded-s0-HASH is one of the stage a too; leave one of them"),
        ("stages: {a: {command: train}, b: {command: train run.seed=1 run.root=/x}}", [],
            ":2: stages: b: command: its runs go to /x, those of a to HOME/runs; take one run.root for all stages"),
        ("stages: {a: {command: train learner.lrr=1}}", [], ":2: stages: a: command: learner.lrr=1: no such key; did"),
        ("stages: {a: {command: train}}", ["learner.lrr=1"], ":2: stages: a: command: learner.lrr=1: no such key"),
        ("stages: {a: {command: train --jobs 2}}", [], ":2: stages: a: command: --jobs is for several runs on this"),
        ("stages: {a: {command: 'train --seeds 0,1 --jobs 2 launcher=slurm'}}", [], ":2: stages: a: command: --jobs is"
            " for several runs on this machine; with launcher=slurm set launcher.max_parallel"),
        ("stages: {a: {command: ablate --variant ful}}", [], ":2: stages: a: command: no variant 'ful'; did you mean"),
        ("stages: {a: {command: runs, launcher: [launcher.partition=x]}}", [], ":2: stages: a: command: launcher"),
        ("stages: {a: {command: runs, launcher: [launcher=slurm, launcher.tim_min=x]}}", [],
            ":2: stages: a: command: launcher.tim_min=x: no such key; did you mean launcher.time_min?"),
        ("stages: {a: {command: sweep nowhere}}", [], ":2: stages: a: command: no grid nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_its_place(
    home: Path, text: str, more: Sequence[str], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(home, f"name: g\n{text}\n", *more)
    message = str(error.value).removeprefix(str(home / "graph.yaml")).replace(str(home), "HOME")
    if "HASH" in said:
        before, after = said.split("HASH")
        assert message.startswith(before)
        assert message[len(before) + 10 :].startswith(after)
    else:
        assert message.startswith(said)


# --- what a command asks of Slurm ---------------------------------------------------------------------------


def test_a_command_gets_the_nodes_and_gpus_it_asks_for_although_no_backend_uses_them(tmp_path: Path) -> None:
    words = ["launcher=slurm", "launcher.nodes=2", "launcher.gpus_per_node=8"]
    found = command_launcher(words)
    assert isinstance(found, SlurmLauncherConfig)
    assert (found.nodes, found.gpus_per_node, found.gpus) == (2, 8, 16)
    last = command_launcher([*words, "launcher.nodes=null"])
    assert isinstance(last, SlurmLauncherConfig)
    assert (last.nodes, last.gpus_per_node) == (1, 8)
    shipped = command_launcher(["launcher=slurm-gpu"])
    assert isinstance(shipped, SlurmLauncherConfig)
    assert (shipped.nodes, shipped.gpus_per_node, shipped.cpus_per_task) == (1, 1, 8)
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "mine.yaml").write_text(
        "defaults: [slurm]\nnodes: 3 # of ours\ngpus_per_node: 4\n"
    )
    own = command_launcher(["launcher=mine", "launcher.partition=p"], [tmp_path])
    assert isinstance(own, SlurmLauncherConfig)
    assert (own.nodes, own.gpus_per_node, own.partition) == (3, 4, "p")
    assert command_launcher([]).name == "inline"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launcher.nodes=0", "launcher.nodes=0: must be a whole number from 1, or null"),
        ("launcher.nodes=two", "launcher.nodes=two: must be a whole number from 1, or null"),
        ("launcher.gpus_per_node=-1", "launcher.gpus_per_node=-1: must be a whole number from 0, or null"),
    ],
)
def test_numbers_of_a_command_are_checked(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_launcher(["launcher=slurm", word])
    assert str(error.value) == said


# --- from stages to batches ---------------------------------------------------------------------------------

CHAIN = """\
name: g
base: [preset=embedded, launcher=slurm]
stages:
  train: {command: train run.seed=3}
  both: {command: "train --seeds 0,1", after: [train], launcher: [launcher.time_min=30]}
  look: {command: "show {both}", after: [both], after_any: [train], every_node: true}
"""


def live(run_id: str, job_id: str) -> TaskStatus:
    """A run that a job of another launch has."""
    facts = dict.fromkeys(("attempt", "restarts", "step", "budget", "eta_s", "value"))
    words = dict.fromkeys(("title", "path", "reason", "mend", "node", "metric", "submitted", "log"), "")
    return TaskStatus(
        launch="20260102T030405-0a1b2c", batch="cells", index=0, number=1, kind="run", run_id=run_id, state="running",
        live=True, job_id=job_id, slurm_state="RUNNING", **facts, **words,
    )  # fmt: skip


def left_of(planned: Planned, finished: int = 0, jobs: Sequence[str] = ()) -> Todo:
    """The first cells have finished, the next are in these jobs, the rest is to be submitted."""
    assert planned.runs is not None
    cells = list(zip(planned.runs.plan.cells, planned.runs.plan.run_ids, strict=True))
    held = cells[finished : finished + len(jobs)]
    in_jobs = {run_id: live(run_id, job) for (_, run_id), job in zip(held, jobs, strict=True)}
    return Todo(tuple(cells[finished + len(jobs) :]), in_jobs, finished)


def test_a_batch_per_stage_with_what_it_waits_for(home: Path) -> None:
    stages = plan(home, CHAIN)
    left = {name: left_of(stages[name]) for name in ("train", "both")}
    train, both, look = graph_batches(list(stages.values()), left)
    run, sweep = stages["train"].runs, stages["both"].runs
    assert run is not None
    assert sweep is not None
    assert (train.name, train.after, train.launcher.time_min) == ("train", (), 240)
    assert [(task.kind, task.run) for task in train.tasks] == [("run", run.plan.run_ids[0])]
    assert (both.name, both.after, both.launcher.time_min) == ("both", (After("train", "ok"),), 30)
    assert [task.run for task in both.tasks] == list(sweep.plan.run_ids)
    assert look.after == (After("both", "ok"), After("train", "any"))
    assert look.tasks == (Task("command", words=("show", sweep.plan.run_id), title="look", every_node=True),)


def test_what_has_finished_is_not_waited_for_and_what_another_launch_runs_is(home: Path) -> None:
    """train has finished; of both one run is in job 7_1, and the other is to be submitted, or has finished."""
    stages = plan(home, CHAIN)
    todo = {"train": left_of(stages["train"], finished=1), "both": left_of(stages["both"], jobs=["7_1"])}
    both, look = graph_batches(list(stages.values()), todo)
    assert (len(both.tasks), both.after) == (1, ())
    assert look.after == (After("both", "ok"), After("both", "ok", "7_1"))
    todo["both"] = left_of(stages["both"], finished=1, jobs=["7_1"])
    (look,) = graph_batches(list(stages.values()), todo)
    assert look.after == (After("both", "ok", "7_1"),)
    todo["both"] = left_of(stages["both"], finished=2)
    (look,) = graph_batches(list(stages.values()), todo)
    assert look.after == ()


def test_a_run_that_is_being_submitted_elsewhere_cannot_be_waited_for_yet(home: Path) -> None:
    stages = plan(home, CHAIN)
    todo = {"train": left_of(stages["train"], jobs=[""]), "both": left_of(stages["both"])}
    with pytest.raises(
        ConfigError, match=r"graph.yaml:5: .* launch 20260102T030405-0a1b2c is about to submit"
    ):
        graph_batches(list(stages.values()), todo)


def test_cells_that_ask_for_different_nodes_are_batches_of_one_stage(home: Path) -> None:
    """A stage that waits for them waits for all: `After` names the stage."""
    (home / "grid.yaml").write_text("name: sizes\naxes: {launcher.cpus_per_task: [1, 2], run.seed: [0, 1]}\n")
    text = "base: [preset=embedded, launcher=slurm]\nstages:\n"
    text += f"  sizes: {{command: 'sweep {home}/grid.yaml'}}\n  look: {{command: runs, after: [sizes]}}\n"
    with pytest.raises(ConfigError, match="are the same run"):
        plan(home, f"name: g\n{text}")  # where a cell runs does not make it another one
    (home / "grid.yaml").write_text(
        "name: sizes\naxes:\n  size:\n    small: [run.seed=0, launcher.cpus_per_task=1]\n    large: [run.seed=1]\n"
    )
    stages = plan(home, f"name: g\n{text}")
    small, large, look = graph_batches(list(stages.values()), {"sizes": left_of(stages["sizes"])})
    assert {small.stage, large.stage} == {"sizes"}
    assert small.name != large.name
    assert [batch.launcher.cpus_per_task for batch in (small, large)] == [1, 2]
    assert look.after == (After("sizes", "ok"),)


# --- what ships ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((CONFIG_DIR / "graph").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_graph_can_be_planned_for_slurm(home: Path, file: Path) -> None:
    graph = read_graph(file, makes_runs)
    stages = plan_stages(graph, Planner(()), [])
    assert graph.name == file.stem
    assert [planned.stage.name for planned in stages] == ["train", "eval", "report"]
    assert all(planned.on_slurm for planned in stages)
    assert "graph" not in groups()

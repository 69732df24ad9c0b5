"""`launcher=slurm` against a real cluster: sweeps, graphs, single runs, and what is refused before it is submitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .desk import Desk

SWEEP_S = 240.0
RUN_S = 120.0
SHORT = {"run.max_steps": 2, "probe.prompts": 1}
"""A run that is over a second after its start-up."""


def test_nine_variants_finish_on_four_nodes(desk: Desk) -> None:
    variants_own = ("method.pool.fill=", "method.phase.mode=", "method.phase.fixed=")
    words = desk.tiny(**{"run.policy_updates": 2, "run.max_steps": "null"})
    words = [word for word in words if not word.startswith(variants_own)]
    # whole nodes, so that four of them are at work at a time
    words += ["launcher=slurm", "launcher.cpus_per_task=32"]
    made = desk.well("ablate", "--variant", "all", "--seeds", "0", *words, "--json").json()
    assert len(made["jobs"]) == 9

    tasks = desk.succeed(made["sweep"], SWEEP_S)
    assert [task["job_id"] for task in tasks] == [job["job_id"] for job in made["jobs"]]
    assert {task["node"] for task in tasks} == {"node1", "node2", "node3", "node4"}
    desk.agrees_with_sacct(made["sweep"])


def test_a_baseline_carries_job_node_and_attempt_into_mlflow(desk: Desk) -> None:
    more = {
        "judge": "digit",
        "validation.judge_report": "false",
        "data.on_long_prompt": "drop",
        "tracking": "mlflow",
    }
    race_only = (
        "method.rubric.on",
        "method.pool",
        "method.phase",
        "method.routing",
        "method.entries",
        "judge.",
    )
    words = desk.tiny(**{"run.policy_updates": 2, "run.max_steps": "null", **more})
    words = [word for word in words if not word.startswith(race_only)]
    made = desk.well("baseline", "--method", "evolm", *words, "launcher=slurm", "--json").json()

    (task,) = desk.succeed(made["sweep"], RUN_S)
    desk.agrees_with_sacct(made["sweep"])
    desk.well("sync")
    tags = desk.mlflow(task["run_id"])
    place = ("racelab.slurm_job_id", "racelab.node", "racelab.attempt")
    assert tuple(tags[name] for name in place) == (task["job_id"], task["node"], "1")
    assert tags["mlflow.parentRunId"] == desk.read(made["sweep"], "run.json")["mlflow_run_id"]


def test_every_condition_of_frozenlake_finishes(desk: Desk) -> None:
    words = ["task", "--name", "frozenlake", "--condition", "all", "run.updates=2", "tracking=none"]
    made = desk.well(*words, "launcher=slurm", "--json").json()
    assert len(made["jobs"]) >= 3

    tasks = desk.succeed(made["sweep"], SWEEP_S)
    assert [task["job_id"] for task in tasks] == [job["job_id"] for job in made["jobs"]]
    desk.agrees_with_sacct(made["sweep"])


GRAPH = """\
name: train-eval-report
base: [preset=embedded, launcher=slurm]
stages:
  train:
    command: train {words}
  eval:
    command: eval {{train}} {evaluation}
    after: [train]
    launcher: [launcher.time_min=5]
  report:
    command: show {{train}}
    after_any: [train, eval]
    launcher: [launcher.time_min=5, launcher.nodes=2, launcher.gpus_per_node=8, launcher.partition=gpu]
"""


def graph(desk: Desk, **more: object) -> str:
    """The graph as a file; its run takes seconds."""
    file = desk.folder / "graph.yaml"
    words = " ".join(desk.tiny(**{**SHORT, **more}))
    file.write_text(GRAPH.format(words=words, evaluation=" ".join(gsm8k(desk))))
    return str(file)


def gsm8k(desk: Desk) -> list[str]:
    """The words of an evaluation of a few seconds on questions of its own."""
    file = desk.folder / "gsm8k.jsonl"
    questions = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(6)]
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = f"eval.data.gsm8k={file}"
    return ["--benchmarks", "gsm8k", data, "eval.max_tokens=8", "tracking=none"]


def by_stage(tasks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {task["stage"]: task for task in tasks}


def test_a_graph_runs_through_and_its_report_has_sixteen_gpus(desk: Desk) -> None:
    launch = desk.well("launch", graph(desk), "--json").json()["launch"]
    stages = by_stage(desk.succeed(launch, RUN_S))
    assert set(stages) == {"train", "eval", "report"}

    jobs = [stages[name]["job_id"] for name in ("train", "eval", "report")]
    rows = {row["JobID"]: row for row in desk.cluster.sacct(*jobs)}
    times = [(rows[job]["Start"], rows[job]["End"]) for job in jobs]
    assert times == sorted(times)
    assert times[0][1] <= times[1][0] <= times[1][1] <= times[2][0]
    tres = desk.cluster.alloc_tres(stages["report"]["job_id"])
    assert (tres["node"], tres["gres/gpu"]) == ("2", "16")
    run = stages["train"]["run_id"]
    assert run in desk.well("logs", f"{launch}:report").out
    evaluations = [
        path for path in desk.root.glob("*/run.json") if json.loads(path.read_text())["kind"] == "eval"
    ]
    (facts,) = (json.loads(path.read_text()) for path in evaluations)
    assert (facts["status"], facts["evaluates"]["run_id"]) == ("finished", run)


def test_evaluations_run_as_jobs_one_per_seed(desk: Desk) -> None:
    words = ["eval", str(desk.model), *gsm8k(desk), "--seeds", "0,1", "launcher=slurm"]
    made = desk.well(*words, "--json").json()
    tasks = desk.succeed(made["sweep"], RUN_S)
    assert [task["job_id"] for task in tasks] == [job["job_id"] for job in made["jobs"]]
    desk.agrees_with_sacct(made["sweep"])
    shown = desk.well("show", made["sweep"], "--json").json()
    assert [set(cell["scores"]) for cell in shown["cells"]] == [{"gsm8k"}, {"gsm8k"}]
    assert "submitted" not in desk.well(*words).out  # all is done


def test_what_waits_for_a_failed_stage_never_starts_and_says_so(desk: Desk) -> None:
    launch = desk.well("launch", graph(desk, **{"model.train_from_layer": 99}), "--json").json()["launch"]
    stages = by_stage(desk.finish(launch, RUN_S))
    assert (stages["train"]["state"], stages["eval"]["state"]) == ("failed", "cancelled")
    assert stages["eval"]["reason"] == "never started: train did not end well"
    assert stages["report"]["state"] == "finished"
    assert desk.cluster.state(stages["eval"]["job_id"]) == "CANCELLED"


def test_a_folder_with_spaces(desk: Desk) -> None:
    folder = desk.folder / "two words, 'quoted' & more"
    folder.mkdir()
    there = replace(desk, folder=folder)
    run = there.train(**SHORT)
    (task,) = there.succeed(run, RUN_S)
    assert task["path"] == str(there.root / run)
    assert '"status": "finished"' in there.well("logs", run).out


def test_a_failing_run_shows_its_traceback(desk: Desk) -> None:
    run = desk.train(**SHORT, **{"model.train_from_layer": 99})
    (task,) = desk.finish(run, RUN_S)
    assert (task["state"], task["slurm_state"]) == ("failed", "FAILED")
    assert "99" in task["reason"]
    printed = desk.well("logs", run).out
    assert "Traceback (most recent call last)" in printed
    assert task["reason"] in printed


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (
            ["partition=nope"],
            ["launcher.partition=nope", "cpu, short, gpu, high", 'Slurm: "invalid partition'],
        ),
        (["partition=short", "time_min=60"], ["launcher.time_min=60", "30 min", "PartitionTimeLimit"]),
        (
            ["cpus_per_task=33"],
            ["launcher.cpus_per_task=33", "32 CPUs", 'Slurm: "Requested node configuration'],
        ),
        (["nodelist=node9"], ["launcher.nodelist=node9", 'Slurm: "Invalid node name']),
    ],
    ids=["partition", "time", "cpus", "node"],
)
def test_what_the_cluster_has_not_is_refused_before_submission(
    desk: Desk, words: list[str], reasons: list[str]
) -> None:
    before = desk.cluster.squeue()
    asked = [f"launcher.{word}" for word in words]
    done = desk.racelab("train", *desk.tiny(**SHORT), "launcher=slurm", *asked)
    assert done.code == 2, done.err
    assert [reason for reason in reasons if reason not in done.err] == []
    assert nothing_is_left(desk)
    assert desk.cluster.squeue() == before


def nothing_is_left(desk: Desk) -> bool:
    """No file below the runs' folder."""
    return not [path for path in desk.root.rglob("*") if path.is_file()]


def test_more_nodes_than_there_are_are_refused_before_submission(desk: Desk) -> None:
    before = desk.cluster.squeue()
    file = desk.folder / "graph.yaml"
    words = "[launcher=slurm, launcher.nodes=9]"
    file.write_text(f"name: large\nstages:\n  only:\n    command: runs\n    launcher: {words}\n")
    done = desk.racelab("launch", str(file))
    assert done.code == 2, done.err
    for reason in ("launcher.nodes", "partition cpu has 4", 'Slurm: "Requested node configuration'):
        assert reason in done.err
    assert nothing_is_left(desk)
    assert desk.cluster.squeue() == before


def submit_from_within(desk: Desk, *options: str) -> Path:
    """A job that types `racelab train launcher=slurm`; the file that then holds the exit code and what was said."""
    words = desk.words("train", *desk.tiny(**SHORT), "launcher=slurm")
    quoted = " ".join(f"'{word}'" for word in words)
    said = desk.folder / "within"
    lines = f"cd '{desk.folder}'; export RACELAB_HOME='{desk.folder}'; {quoted} >out 2>&1; echo $? >>out; mv out within"
    job = desk.cluster.wrap(lines, "--mem=4G", *options)
    desk.cluster.wait(said.exists, 60, f"job {job} to have submitted")
    return said


def test_a_plain_job_may_submit(desk: Desk) -> None:
    said = submit_from_within(desk, "--ntasks=3", "--cpus-per-task=4", "--partition=gpu", "--time=3")
    assert said.read_text().splitlines()[-1] == "0", said.read_text()
    (run,) = desk.runs()
    (task,) = desk.succeed(run, RUN_S)
    asked = desk.cluster.job(task["job_id"])
    # none of what the job around it had asked for
    assert (asked["Partition"], asked["NumTasks"], asked["TimeLimit"]) == ("cpu", "1", "04:00:00")


def test_an_array_job_may_not_submit(desk: Desk) -> None:
    said = submit_from_within(desk, "--array=0")
    lines = said.read_text().splitlines()
    assert lines[-1] == "2"
    assert any("array" in line and "error" in line for line in lines)
    assert nothing_is_left(desk)

"""`racelab eval` through the real command line: a scripted server with known right and wrong answers, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.evaluate import _judge_words
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool

from ..experiments.api_server import ApiServer, Behaviour, ok, status, truncated
from ..experiments.tiny_run import overrides, write_tiny_model
from .conftest import Result
from .eval_folders import make_eval

Call = Callable[..., Result]
QUIET = ("tracking=none",)
SUMS = [("two plus two", 4), ("three plus three", 6), ("five plus six", 11), ("nine plus one", 10)]
"""(words of the question, gold)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def gsm8k(folder: Path, sums: Sequence[tuple[str, int]] = SUMS) -> Path:
    return write(
        folder / "gsm8k.jsonl", [{"question": f"What is {q}?", "answer": f"Easy.\n#### {n}"} for q, n in sums]
    )


def served(script: Callable[[str], Behaviour | None]) -> ApiServer:
    return ApiServer(script, models={"scripted": {}})


def boxed(n: object) -> Behaviour:
    return ok(f"I add.\nTherefore, the final answer is $\\boxed{{{n}}}$.")


def rows(run: RunFolder, table: str = "eval_examples") -> list[dict[str, Any]]:
    """All rows of a table, without what tells attempts apart, in the order of the examples."""
    found = [row for r in read_spool(run) if r["kind"] == "rows" and r["table"] == table for row in r["rows"]]
    return sorted(found, key=lambda row: (row["benchmark"], row["example_id"], row.get("idx", 0)))


def runs(root: Path, kind: str = "eval") -> list[RunFolder]:
    found = [
        RunFolder.open(path.parent) for path in sorted(root.glob("*/run.json")) if path.parent.name[0] != "."
    ]
    return [run for run in found if run.info()["kind"] == kind]


def test_a_scripted_model_with_known_right_and_wrong_answers_gets_the_exact_scores(
    call: Call, home: Path
) -> None:
    """GSM8K: 2 of 4 right, one wrong, one without an answer. BBH: 1 of 2 and 1 of 1, micro 2/3.

    MMLU: 1 of 2 and 1 of 1, macro 3/4. AGIEval: 0 of 1 and 1 of 1, macro 1/2.
    """
    bbh = [
        {"task": "boolean_expressions", "input": "not True is", "target": "False"},
        {"task": "boolean_expressions", "input": "not False is", "target": "True"},
        {"task": "object_counting", "input": "I have a drum and a flute. How many?", "target": "2"},
    ]
    mmlu = [
        {
            "subject": "anatomy",
            "question": "Where is the femur?",
            "choices": ["leg", "arm", "head", "ear"],
            "answer": 0,
        },
        {
            "subject": "anatomy",
            "question": "Where is the ulna?",
            "choices": ["leg", "arm", "head", "ear"],
            "answer": 1,
        },
        {
            "subject": "marketing",
            "question": "What is a brand?",
            "choices": ["a", "b", "c", "name"],
            "answer": 3,
        },
    ]
    agieval = [
        {"task": "sat-math", "passage": "", "question": "Half of ten?", "options": ["(A)5", "(B)6"], "label": "A"},
        {"task": "sat-en", "passage": "R.", "question": "What fell?", "options": ["(A)hail", "(B)it"], "label": "B"},
    ]  # fmt: skip

    def script(prompt: str) -> Behaviour | None:
        answers = {
            "two plus two": boxed(4),
            "three plus three": boxed(6),
            "five plus six": boxed(12),
            "nine plus one": ok("I would rather not say."),
            "not True is": ok("So the answer is False."),
            "not False is": ok("So the answer is False."),
            "a drum and a flute": ok("So the answer is 2."),
            "femur": ok("Therefore, the answer is: A"),
            "ulna": ok("Therefore, the answer is: D"),
            "brand": ok("Therefore, the answer is: D"),
            "Half of ten": ok("Therefore, the answer is (B)"),
            "What fell": ok("Therefore, the answer is (B)"),
        }
        return next((reply for words, reply in answers.items() if words in prompt), None)

    files = {"bbh": bbh, "mmlu": mmlu, "agieval": agieval}
    paths = {name: write(home / f"{name}.jsonl", records) for name, records in files.items()}
    data = [f"eval.data.{name}={path}" for name, path in {**paths, "gsm8k": gsm8k(home)}.items()]
    with served(script) as server:
        done = call("eval", server.url, "--benchmarks", "gsm8k,bbh,mmlu,agieval", *data, *QUIET, "--json")
    assert done.code == 0, done.err
    scores = {name: s["value"] for name, s in done.json()["scores"].items()}
    assert scores == pytest.approx({"gsm8k": 0.5, "bbh": 2 / 3, "mmlu": 0.75, "agieval": 0.5})
    assert done.json()["scores"]["gsm8k"]["unparsed"] == 1
    assert done.json()["avg"] is None  # the suite's average is over its eight
    (run,) = runs(home / "runs")
    assert [row["score"] for row in rows(run) if row["benchmark"] == "gsm8k"] == [1.0, 1.0, 0.0, 0.0]
    texts = {row["text"] for row in rows(run, "eval_answers")}
    assert "I would rather not say." in texts
    shown = call("show", run.run_id)
    assert shown.code == 0
    assert "gsm8k" in shown.out
    assert "50.0" in shown.out


def test_a_thinking_model_is_scored_behind_its_thought_where_the_protocol_has_it_so(
    call: Call, home: Path
) -> None:
    thought = (
        "<think>The final answer is 5? No, \\boxed{6}.</think>Therefore, the final answer is $\\boxed{4}$."
    )
    with served(lambda prompt: ok(thought)) as server:
        words = [
            "eval",
            server.url,
            "--benchmarks",
            "gsm8k",
            f"eval.data.gsm8k={gsm8k(home, SUMS[:1])}",
            *QUIET,
            "--json",
        ]
        assert call(*words, "--json").json()["scores"]["gsm8k"]["value"] == 1.0


def test_what_no_server_answered_is_lost_not_wrong_and_asked_again(call: Call, home: Path) -> None:
    """One question of four fails: exit code 4, three examples have a score; on going on only that one is asked."""
    broken = True

    def script(prompt: str) -> Behaviour | None:
        if "five plus six" in prompt and broken:
            return status(500)
        return next((boxed(n) for words, n in SUMS if words in prompt), ok("yes"))

    options = ["server.max_retries=0", "server.cache=false", *QUIET]
    with served(script) as server:
        words = [
            "eval",
            server.url,
            "--benchmarks",
            "gsm8k",
            f"eval.data.gsm8k={gsm8k(home)}",
            *options,
            "--json",
        ]
        first = call(*words)
        assert first.code == 4, first.err
        assert (first.json()["scores"]["gsm8k"]["n"], first.json()["scores"]["gsm8k"]["lost"]) == (3, 1)
        assert first.json()["scores"]["gsm8k"]["value"] == 1.0
        (run,) = runs(home / "runs")
        assert (run.status(), "got no answer" in run.info()["reason"]) == ("failed", True)
        broken = False
        before = len(server.requests)
        second = call("resume", run.run_id, "--json")
        asked = [r.prompt for r in server.requests[before:] if "plus" in r.prompt]
    assert second.code == 0, second.err
    assert ["five plus six" in prompt for prompt in asked] == [True]
    assert run.status() == "finished"
    scores = second.json()["scores"]["gsm8k"]
    assert (scores["value"], scores["n"], scores["lost"]) == (1.0, 4, 0)


def test_how_far_a_stopped_evaluation_came_is_said_in_examples(call: Call, home: Path) -> None:
    def script(prompt: str) -> Behaviour | None:
        if "five plus six" in prompt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return next((boxed(n) for words, n in SUMS if words in prompt), ok("yes"))

    words = ["--benchmarks", "gsm8k", f"eval.data.gsm8k={gsm8k(home)}", "server.concurrency=1", *QUIET]
    with served(script) as server:
        done = call("eval", server.url, *words)
    assert (done.code, "stopped by signal 15 after 2 of 4 examples" in done.err) == (143, True), done.err


def test_a_cut_answer_is_kept_as_cut(call: Call, home: Path) -> None:
    with served(lambda prompt: truncated("Therefore, the final ans")) as server:
        words = [
            "eval",
            server.url,
            "--benchmarks",
            "gsm8k",
            f"eval.data.gsm8k={gsm8k(home, SUMS[:1])}",
            *QUIET,
        ]
        assert call(*words).code == 0
    (run,) = runs(home / "runs")
    assert [row["finished"] for row in rows(run, "eval_answers")] == [False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "--suite", "race"], "nothing to evaluate"),
        (["eval", "embeded"], "did you mean embedded?"),
        (["eval", "embedded", "--benchmarks", "gsm9k"], "did you mean gsm8k?"),
        (
            ["eval", "embedded", "--suite", "rubric", "--benchmarks", "gsm8k"],
            "does not belong to --suite rubric",
        ),
        (["eval", "embedded", "--protocol", "lm-eval", "eval.thinking=strip"], "are olmo3-adapt's"),
        (["eval", "embedded", "--benchmarks", "gsm8k", "eval.data.gsm8k=nowhere.jsonl"], "eval.data.gsm8k"),
        (["eval", "embedded", "--benchmarks", "gsm8k", "subject.checkpoint=3"], "subject.checkpoint"),
        (["eval", "embedded", "--benchmarks", "gsm8k", "eval.limit=0"], "eval.limit"),
        (["eval", "latest", "--resume", "x"], "leave latest out"),
        (
            ["eval", "--resume", "x", "--limit", "3", "--protocol", "lm-eval"],
            "leave --protocol lm-eval --limit 3 out",
        ),
        (
            ["eval", "embedded", "--judge", "http://a/v1"],
            "--judge http://a/v1: changes nothing here: only the rubric",
        ),
        (["eval", "http://a/v1", "--dry-run", "eval.batch=3"], "eval.batch=3: changes nothing here"),
        (["eval", "embedded", "--benchmarks", "gsm8k", "backend=verl"], "backend=verl: changes nothing here"),
        (["eval", "http://a/v1", "subject.source=embedded"], "leave one of them out"),
        (["eval", "embedded", "+subject.source=org/name"], "leave one of them out"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(
    call: Call, home: Path, words: list[str], said: str
) -> None:
    done = call(*words)
    assert done.code == 2
    assert said in done.err
    assert not (home / "runs").exists()


def test_a_server_that_is_not_there_is_code_4_and_leaves_no_run(call: Call, home: Path) -> None:
    done = call("eval", "http://127.0.0.1:9/v1", "--benchmarks", "gsm8k", f"eval.data.gsm8k={gsm8k(home)}")
    assert done.code == 4, done.err
    assert not runs(home / "runs")


@pytest.mark.slow
def test_seeds_are_cells_and_the_same_command_finds_them_done(call: Call, home: Path) -> None:
    with served(lambda prompt: next((boxed(n) for words, n in SUMS if words in prompt), ok("yes"))) as server:
        words = [
            "eval",
            server.url,
            "--benchmarks",
            "gsm8k",
            f"eval.data.gsm8k={gsm8k(home)}",
            "--seeds",
            "0,1",
            *QUIET,
        ]
        plan = call(*words, "--dry-run", "--json")
        assert [row["status"] for row in plan.json()] == ["new", "new"]
        done = call(*words, "--json")
        assert done.code == 0, done.err
        assert [cell["status"] for cell in done.json()["cells"]] == ["finished", "finished"]
        assert [cell["scores"]["gsm8k"] for cell in done.json()["cells"]] == [1.0, 1.0]
        before = len(server.requests)
        again = call(*words)
        assert again.code == 0, again.err
        assert "gsm8k" in again.out
        assert not [r for r in server.requests[before:] if "plus" in r.prompt]
    assert [run.info()["seed"] for run in runs(home / "runs")] == [0, 1]


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", *words],
        env={**os.environ, "RACELAB_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(home: Path, *words: str) -> None:
    process = start(home, *words)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


@pytest.mark.slow
def test_an_evaluation_that_is_killed_or_stopped_goes_on_and_ends_with_the_same_table(
    model: Path, tmp_path: Path
) -> None:
    """SIGKILL after a third of the examples, SIGTERM after two thirds; all rows equal those of one left in peace."""
    data = gsm8k(tmp_path, [(f"{a} plus {b}", a + b) for a in range(10) for b in range(6)])
    words = [
        "eval", str(model), "--benchmarks", "gsm8k", f"eval.data.gsm8k={data}", "eval.max_tokens=24", "eval.batch=4",
        *QUIET,
    ]  # fmt: skip
    ended(tmp_path / "whole", *words)
    (reference,) = runs(tmp_path / "whole" / "runs")

    home = tmp_path / "killed"
    for signum, count in ((signal.SIGKILL, 20), (signal.SIGTERM, 40)):
        process = start(home, *words)
        wait(home, count, process)
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
        (run,) = runs(home / "runs")
        assert count <= len(rows(run)) < 60
        words = ["eval", "--resume", run.run_id]
    assert process.returncode == 143, err
    assert (run.status(), f"eval --resume {run.run_id}" in err) == ("interrupted", True)
    ended(home, *words)
    for table in ("eval_examples", "eval_answers"):
        newest = {(r["benchmark"], r["example_id"], r.get("idx", 0)): r for r in rows(run, table)}
        assert list(newest.values()) == rows(reference, table)
    assert len(rows(run)) == 60  # no example has been asked for twice


def wait(home: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the one evaluation there has so many rows."""
    end = time.monotonic() + 120
    while True:
        found = runs(home / "runs") if (home / "runs").exists() else []
        if found and found[0].attempts() and len(rows(found[0])) >= count:
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_training_run_is_evaluated_at_its_checkpoint(model: Path, tmp_path: Path) -> None:
    words = ["train", *overrides(model, tmp_path / "runs", **{"run.max_steps": 4})]
    environment = {**os.environ, "RACELAB_HOME": str(tmp_path)}
    racelab = [sys.executable, "-m", "racelab.cli.main"]
    trained = subprocess.run([*racelab, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stderr
    (run,) = runs(tmp_path / "runs", "train")
    words = [
        "eval",
        run.run_id,
        "--benchmarks",
        "gsm8k",
        f"eval.data.gsm8k={gsm8k(tmp_path)}",
        "eval.max_tokens=8",
    ]
    done = subprocess.run(
        [*racelab, *words, "--json"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (evaluation,) = runs(tmp_path / "runs")
    facts = evaluation.info()["evaluates"]
    assert (facts["run_id"], facts["checkpoint"]) == (run.run_id, 4)
    assert {row["checkpoint"] for row in rows(evaluation)} == {4}
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    logged = client.get_run(evaluation.info()["mlflow_run_id"])
    assert "eval/race/gsm8k" in logged.data.metrics


def test_latest_is_the_newest_that_trained(
    call: Call, home: Path, make_run: Callable[..., RunFolder]
) -> None:
    run = make_run("mine")
    make_eval(home / "runs", {"gsm8k": [1.0]}).update(started="2999-01-01T00:00:00.000+00:00")
    done = call("eval", "latest", "--benchmarks", "gsm8k", f"eval.data.gsm8k={gsm8k(home)}")
    assert (done.code, f"run {run.run_id} has no checkpoint" in done.err) == (2, True), done.err


def test_a_judge_behind_a_url_is_sampled_as_the_protocol_has_it_unless_another_is_chosen() -> None:
    assert _judge_words("http://a/v1", []) == ["judge=api-thinking", "judge.base_url='http://a/v1'"]
    assert _judge_words("http://a/v1", ["judge=api"]) == ["judge.base_url='http://a/v1'"]

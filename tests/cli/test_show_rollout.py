"""`racelab show RUN --rollout ID` as a person types it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.load import load_table
from racelab.analysis.transcript import load_transcripts
from racelab.analysis.transcript_text import facts
from racelab.experiments.runfolder import RunFolder

from ..analysis.rollout_run import HOSTILE, LONG, write_run

Call = Callable[..., Any]
BOARD = "A agent, B goal, C hole, D safe (the symbols that an agent of the text task is shown, RLDS App. D.1)"
BOXES = re.compile("[\u2500-\u257f]")


@pytest.fixture
def run(home: Path) -> RunFolder:
    return write_run(home / "runs")


def test_a_rollout_off_a_terminal_is_plain_and_whole(call: Call, run: RunFolder) -> None:
    result = call("show", "latest", "--rollout", "2:0:0")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "       reward  +1.000, solved, end: answer" in lines
    assert (
        "    advantage  Â_i +1.300 (SDAE, trained with), scalar GRPO +0.707, std over tokens 0.250" in lines
    )
    assert ["plan", "0.750", "5", "0", "+0.400"] in [line.split() for line in lines]
    assert ["act", "0.250", "3", "12", "→", "1", "+0.100"] in [line.split() for line in lines]
    at = lines.index("Turn 0  +1.500  sampled  ◆ plan")
    assert [line.split(maxsplit=1) for line in lines[at + 1 : at + 3]] == [
        ["reply", "I look."],
        ["observation", "Found."],
    ]
    assert "Turn 1  +0.750  sampled  ◆ act" in lines
    assert lines[lines.index("System prompt") + 1 :][:2] == [f"{'':15}Answer.", f"{'':15}Be brief."]
    assert "Eq 3 weighs turns, not tokens" in result.out
    assert "A pivot of - stands for no decisive turn" in result.out
    assert (
        "    from A_ik  Â_i = Σ φ_k A_ik / (σ_batch + ε), σ_batch = 0.250 (this step); turn values"
        in result.out
    )
    at = lines.index("Demonstration: 2 turns (task.demonstration=true)")
    assert lines.index("System prompt") < at < lines.index("First observation")
    shown = ["user: Where?", "reply: I ask.", "user: <b>There.", "reply: There"]
    assert [line.strip() for line in lines[at + 1 : at + 5]] == shown
    assert "board  " not in result.out


def test_a_retry_shows_why_and_no_text_of_it_acts(call: Call, run: RunFolder) -> None:
    out = call("show", "latest", "--rollout", "2:0:2").out
    assert "kind  retry of 2:0:1 from turn 1" in out
    assert "δR +1.000" in out
    assert "Turn 0  +0.000  replayed  masked\n" in out
    for text in (
        "Look twice.",
        '{"report": "hasty"}',
        '{"plan": 4}',
        LONG.strip(),
        r"\x1b[31mred\x1b[0m [bold]b[/bold]",
    ):
        assert text in out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert BOXES.search(out) is None


def test_an_original_that_was_cut_and_retried(call: Call, run: RunFolder) -> None:
    out = call("show", "latest", "--rollout", "2:0:1").out
    assert "retries  idx 2 from turn 1, δR +1.000" in out
    assert "grading  bad_json" in out
    assert "Turn 1  -2.000  sampled  cut at the limit\n" in out


def test_a_grid_is_drawn(call: Call, run: RunFolder) -> None:
    out = call("show", "latest", "--rollout", "2:1:0").out
    assert "First observation (drawn; the agent saw grid tokens)" in out
    assert "note  No advantage in this rollout: " in out
    assert f"reply  Down\n  observation  Current Observation:\n{'':15}D D\n{'':15}A B\n" in out


@pytest.mark.parametrize(("where", "rows"), [("2", 5), ("2:0", 3), ("1", 1)])
def test_a_list(call: Call, run: RunFolder, where: str, rows: int) -> None:
    result = call("show", "latest", "--rollout", where)
    lines = result.out.splitlines()
    head = 3 if where == "1" else 1
    assert lines[head].split()[:4] == ["rollout", "kind", "reward", "solved"]
    assert len([line for line in lines if re.match(r"\d+:\d+:\d+ ", line)]) == rows
    if where == "1":
        assert lines[1] == "No transcripts were kept of this step, only of 2 (run.transcripts_every)"
        assert lines[-1].startswith("1:0:0 ")
    else:
        assert "--rollout 2:0:0" in lines[-1]
    found = call("show", "latest", "--rollout", where, "--json").json()
    assert (found["step"], len(found["rollouts"])) == (int(where[0]), rows)


def test_json_is_everything(call: Call, run: RunFolder) -> None:
    (transcript,) = load_transcripts(run, 2, 0, 2)
    found = call("show", "latest", "--rollout", "2:0:2", "--json").json()
    assert found["turns"][1]["text"] == HOSTILE
    assert found["token_adv"] == list(transcript.token_adv)
    assert found["retries"][0]["weight"] == 0.625
    assert set(found) == set(transcript.to_json())


def test_a_page_of_a_rollout_and_of_a_group(call: Call, run: RunFolder, home: Path) -> None:
    result = call("show", "latest", "--rollout", "2:0:2", "--html", "new/one.html")
    assert (result.code, result.out, result.err) == (0, "", "wrote new/one.html\n")
    assert (home / "new/one.html").read_text(encoding="utf-8").count("<section") == 1
    assert call("show", "latest", "--rollout", "2:0", "--html", "g.html", "--json").json()["step"] == 2
    assert (home / "g.html").read_text(encoding="utf-8").count("<section") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout", "2:0:9"], "has no rollout 9; it has 0-2 (2: retries)"),
        (["--rollout", "1:0:0"], "there are transcripts of step 2 (run.transcripts_every)"),
        (["--rollout", "two"], "write STEP:GROUP:IDX"),
        (["--rollout", "2", "--html", "x.html"], "name one, as --rollout 2:0"),
        (["--rollout", "2:0:0", "--html", "."], "cannot write ."),
        (["--rollout", "2", "--step", "2"], "--step and --rollout"),
        (["--html", "x.html"], "--html is for a rollout"),
        (["--full"], "--full is for a rollout"),
        (["--step", "2"], "is an RLDS run"),
    ],
)
def test_what_cannot_be_shown_is_one_line(call: Call, run: RunFolder, words: list[str], message: str) -> None:
    result = call("show", "latest", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_a_race_run_has_no_rollouts(call: Call, make_run: Call) -> None:
    make_run()
    result = call("show", "latest", "--rollout", "1:0:0")
    assert result.code == 2
    assert "is a RACE run, which has no rollouts; `racelab show" in result.err


def test_a_sweep_names_its_cells(call: Call, run: RunFolder, home: Path) -> None:
    cells = f"cells:\n- {{cell: a, run_id: {run.run_id}, label: a, seed: 0}}\n"
    sweep = RunFolder.create(
        home / "runs", "sweep", composed_yaml=cells, overrides=[], info={"kind": "sweep"}
    )
    result = call("show", sweep.run_id, "--rollout", "2:0:0")
    assert (result.code, result.out) == (2, "")
    assert f"{sweep.run_id} is a sweep; name one of its cells: {run.run_id}" in result.err


def on_a_terminal(*words: str) -> str:
    """What the command writes to a terminal of 100 columns and 24-bit colour."""
    parent, child = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100", "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", *words], stdout=child, stderr=child, env=environment
    )
    os.close(child)
    data = b""
    try:
        while block := os.read(parent, 1 << 16):
            data += block
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    assert process.wait(60) == 0
    return data.decode("utf-8").replace("\r\n", "\n")


def test_a_terminal_has_colours_and_cuts_long_texts(run: RunFolder) -> None:
    out = on_a_terminal("show", run.run_id, "--rollout", "2:0:2")
    assert "48;2;96;200;120m" in out  # the largest above 0
    assert "more characters (--full)" in out
    assert r"\x1b[31mred" in out
    assert "\x1b[31m" not in out
    assert BOXES.search(out) is not None
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.splitlines()) <= 100
    full = on_a_terminal("show", run.run_id, "--rollout", "2:0:1", "--full")
    assert "48;2;240;120;112m" in full  # the largest below 0
    assert "--full" not in full
    assert full.count("word") == 400


@pytest.mark.slow
def test_the_embedded_run(call: Call, home: Path) -> None:
    """Trained by the real code: everything that is shown is what the tables hold, and every board is drawn."""
    words = "task=frozenlake model.grid.warmup_steps=60 run.updates=1 task.train_examples=60 task.validation_examples=5"
    more = "task.prompts_per_step=2 tracking=none run.transcripts_every=1"
    assert call("train", *words.split(), *more.split()).code == 0
    run = RunFolder.open(next((home / "runs").glob("*/run.json")).parent)
    rows = load_table(run, "rollouts")
    pairs = load_table(run, "retry_pairs")
    assert len(pairs) > 0
    for group in (0, 1):
        for t in load_transcripts(run, 1, group):
            row = rows[(rows["group"] == group) & (rows["idx"] == t.rollout.idx)].iloc[0]
            assert t.drawn
            assert ("board", BOARD) in facts(t)
            assert t.grader == "scripted"
            phi_A = sum(s.phi * s.advantage for s in t.subtasks if s.advantage is not None)
            assert t.scaling.sigma_batch is not None
            assert phi_A / (t.scaling.sigma_batch + 1e-6) == pytest.approx(t.rollout.adv_sdae, abs=1e-9)
            assert len(t.turns) == row["n_turns"]
            assert [s.grade for s in t.subtasks] == row["grades"]
            assert [s.advantage for s in t.subtasks] == row["A_k"]
            assert sum(s.phi for s in t.subtasks) == pytest.approx(1.0)
            assert sum(len(turn.pivots) for turn in t.turns) == sum(p is not None for p in row["pivots"])
            if not t.rollout.is_retry:
                assert mean_of(t) == pytest.approx(row["A_sdae"], abs=1e-9)
                assert (
                    len(t.retries) == ((pairs["group"] == group) & (pairs["parent"] == t.rollout.idx)).sum()
                )
            assert call("show", "latest", "--rollout", t.rollout.place).code == 0


def mean_of(t: Any) -> float:
    """Token mean of the advantages: Â_i on rows without a masked prefix."""
    values: list[float] = [turn.advantage for turn in t.turns for _ in turn.tokens]
    return sum(values) / len(values)

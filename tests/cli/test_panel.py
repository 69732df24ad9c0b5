"""The live panel, plain lines, and silence."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from racelab.cli.console import number, seconds, sparkline
from racelab.cli.panel import Panel, PlainLines, Silent, make_display
from racelab.experiments.types import StepRecord

STATUS: dict[str, object] = {
    "phase": "policy", "policy_step": 3, "policy_budget": 24, "reward": 0.4125,
    "routes": {"informative": 2, "diversity_collapsed": 1, "rubric_failed": 1, "invalid": 0},
    "sigma_rt": 0.08, "tau_tie": 0.5, "tau_sat": 0.2, "tau_imp": 0.0215, "f_ema": 0.125, "q_ema": 0.3,
    "q_target": 0.25, "pool": 1234, "tokens_per_s": 1234.4, "step_s": 7.2, "eta_s": 200.0, "event": "",
}  # fmt: skip
BOXES = set("│─╭╰╮╯┃━\x1b▁▂▃▄▅▆▇█")


def record(step: int, **changes: object) -> StepRecord:
    return StepRecord(step, {}, {}, {**STATUS, **changes})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_display_fits_the_place() -> None:
    assert isinstance(make_display(True, Terminal()), Silent)
    assert isinstance(make_display(False, io.StringIO()), PlainLines)
    assert isinstance(make_display(False, Terminal()), Panel)


def test_plain_lines_are_one_line_a_step_without_boxes() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.start("race full", 24)
    lines.update(record(3, event="switch deferred"))
    lines.update(record(4, phase="rubric", reward=0.5, routes={}))
    lines.note("checkpoint written")
    lines.stop()
    first, policy, rubric, note = stream.getvalue().splitlines()
    assert first == "race full: 24 policy updates"
    assert policy.split("  ") == [
        "step 3", "policy", "policy 3/24", "reward=0.412", "routes=informative:2,collapsed:1,failed:1",
        "f=0.125/0.200", "q=0.300/0.250", "pool=1,234", "tok/s=1,234", "took=7s eta=3m20s",
        "[switch deferred]",
    ]  # fmt: skip
    assert "rubric  policy 3/24  reward=0.500  pool=1,234" in rubric
    assert note == "checkpoint written"
    assert not BOXES & set(stream.getvalue())


def drawn(panel: Panel) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(panel.render())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_panel_shows_every_value() -> None:
    out = io.StringIO()
    panel = Panel(Console(file=out, force_terminal=True, width=110))
    panel.start("race full seed 0", 24)
    assert "loading models" in drawn(panel)
    for step in range(1, 4):
        panel.update(record(step, reward=0.25 * step))
    panel.update(record(4, phase="rubric", reward=0.625, event="plateau"))
    text = drawn(panel)
    panel.stop()
    panel.stop()
    for part in (
        "race full seed 0", "policy 3/24, step 4", "0.750  ▁▅█", "0.625", "informative 2", "collapsed 1",
        "failed 1", "invalid 0", "σ_rt 0.0800", "τ_tie 0.5000", "τ_sat 0.2000", "τ_imp 0.0215",
        "f̂ 0.125 / τ_sat 0.200",
        "q̂ 0.300 / q* 0.250", "1,234 entries", "1,234 tokens/s", "ETA 3m20s",
    ):  # fmt: skip
        assert part in text, part
    assert "step 4: plateau" in out.getvalue()


def test_missing_values_are_dashes_in_both() -> None:
    stream = io.StringIO()
    PlainLines(stream).update(StepRecord(1, {}))
    assert "reward=-" in stream.getvalue()
    panel = Panel(Console(file=io.StringIO()))
    panel.update(StepRecord(1, {}))
    assert "ETA -" in drawn(panel)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (7800, "2h10m"),
        (None, "-"),
        (float("nan"), "-"),
        (-1, "-"),
    ],
)
def test_seconds(value: object, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (0.12345, "0.123"), (None, "-"), (True, "-"), (float("inf"), "-")],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([1.0, 1.0], "▄▄"),
        ([0.0, 7.0], "▁█"),
        ([0.0, float("nan"), 3.5, 7.0], "▁▅█"),
        ([0, 1, 2, 3], "▁█"),
    ],
)
def test_sparkline(values: list[float], text: str) -> None:
    assert sparkline(values, width=4 if len(values) != 4 or values[1] != 1 else 2) == text


RLDS: dict[str, object] = {
    "phase": "policy", "policy_step": 3, "policy_budget": 500, "reward": 0.25,
    "columns": {"solved": 0.25, "retries": 12, "retry_success": float("nan")},
    "tokens_per_s": 2100.0, "step_s": 0.21, "eta_s": 100.0, "event": "",
}  # fmt: skip


def test_a_method_without_phases_shows_its_own_columns() -> None:
    stream = io.StringIO()
    PlainLines(stream).update(StepRecord(3, {}, {}, RLDS))
    assert stream.getvalue().rstrip("\n").split("  ") == [
        "update 3/500", "reward=0.250", "solved=0.250", "retries=12", "retry_success=-", "tok/s=2,100",
        "took=0.2s eta=1m40s",
    ]  # fmt: skip
    panel = Panel(Console(file=io.StringIO()))
    panel.start("frozenlake rlds", 500)
    panel.update(StepRecord(3, {}, {}, RLDS))
    text = drawn(panel)
    panel.stop()
    for part in ("update 3/500", "solved 0.250   retries 12   retry success -", "2,100 tokens/s   step 0.2s"):
        assert part in text, part
    for part in ("routes", "thresholds", "f̂", "pool", "phase"):
        assert part not in text, part


def test_quick_updates_are_a_line_every_few_seconds_and_the_first_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 updates of 0.02 s are 10 s: a line at 0.02, at 5.02 and at 10; notes and events are never kept back."""
    now = [100.0]
    monkeypatch.setattr("racelab.cli.panel.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    lines = PlainLines(stream)
    for step in range(1, 501):
        now[0] += 0.02
        event = "a word" if step == 7 else ""
        lines.update(StepRecord(step, {}, {}, {**RLDS, "policy_step": step, "event": event}))
        if step == 100:
            lines.note("validation after 100 updates")
    said = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert said[:3] == ["update 1/500", "update 7/500", "validation after 100 updates"]
    assert said[-1] == "update 500/500"
    assert len(said) in (5, 6)

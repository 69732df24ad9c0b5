"""What a person sees of a run in the tracking UI: the runs table, the charts, the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from .conftest import Site


pytestmark = pytest.mark.browser

LINES = (
    "[...document.querySelectorAll('.js-plotly-plot')].flatMap(p => p.data).map(d => [[...d.x], [...d.y]])"
)
"""JavaScript: (x, y) of every line that Plotly drew."""


def test_the_runs_table_lists_the_run(site: Site, page: Page, shots: Path) -> None:
    page.goto(f"{site.url}/#/experiments/{site.experiment}/runs")
    row = page.get_by_text(site.run_name, exact=True).first
    row.wait_for()
    page.screenshot(path=shots / "runs-table.png")
    row.click()
    page.wait_for_url(f"**/runs/{site.run_id}**")


def test_the_chart_page_draws_each_metric_under_its_section(site: Site, page: Page, shots: Path) -> None:
    page.goto(f"{site.url}/#/experiments/{site.experiment}/runs/{site.run_id}/model-metrics")
    for name in ("train/reward", "race/trqc", "mean", "q_ema"):
        page.get_by_text(name, exact=True).first.wait_for()
    steps = list(range(12))
    reward = [steps, pytest.approx([0.4 + step / 40 for step in steps])]
    quarantine = [steps, pytest.approx([0.3 - step / 60 for step in steps])]
    drawn: list[object] = []
    for _ in range(60):  # charts appear one by one
        drawn = page.evaluate(LINES)
        if reward in drawn and quarantine in drawn:
            break
        page.wait_for_timeout(500)
    page.screenshot(path=shots / "charts.png")
    assert reward in drawn
    assert quarantine in drawn


def test_the_run_page_shows_how_it_ended_and_with_what(site: Site, page: Page, shots: Path) -> None:
    page.goto(f"{site.url}/#/experiments/{site.experiment}/runs/{site.run_id}")
    for text in ("Finished", "run.policy_updates", "train/reward/mean"):
        page.get_by_text(text, exact=True).first.wait_for()
    page.screenshot(path=shots / "run-page.png")

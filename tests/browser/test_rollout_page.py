"""The page of a rollout in a browser, with scripts off: what is shown, that nothing is fetched, light and dark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from racelab.analysis.transcript import load_transcripts
from racelab.analysis.transcript_html import page as write_page

from ..analysis.rollout_run import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the group 2:0."""
    folder = tmp_path_factory.mktemp("rollouts")
    file = folder / "group.html"
    file.write_text(write_page(load_transcripts(write_run(folder / "runs"), 2, 0)), encoding="utf-8")
    return file


def style(element: Locator, name: str) -> str:
    """A computed style."""
    return str(element.evaluate(f"e => getComputedStyle(e)['{name}']"))


def numbers(colour: str) -> list[float]:
    """Red, green, blue and, if it is not opaque, alpha."""
    return [float(word) for word in re.findall(r"[\d.]+", colour)]


def luminance(rgb: list[float]) -> float:
    """WCAG 2.2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(ink: list[float], ground: list[float], under: list[float]) -> float:
    """WCAG 2.2, of text on a ground that may let the one under it through."""
    alpha = ground[3] if len(ground) == 4 else 1.0
    seen = [alpha * a + (1 - alpha) * b for a, b in zip(ground[:3], under[:3], strict=True)]
    light, dark = sorted((luminance(ink), luminance(seen)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_group_is_shown_without_scripts(browser: Browser, file: Path, shots: Path, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 1000, "height": 1600}, color_scheme=scheme, java_script_enabled=False
    )
    page: Page = context.new_page()
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    page.goto(file.as_uri())
    first, failed, retry = (page.locator(f"#rollout-2-0-{i}") for i in range(3))

    assert page.title() == "toy: rollouts of 2:0"
    assert first.locator("dd").all_inner_texts()[4] == "+1.000, solved, end: answer"
    assert first.locator("tbody tr").all_inner_texts() == [
        "plan\t0.750\t5\t0\t+0.400",
        "act\t0.250\t3\t12 → 1\t+0.100",
    ]
    heads = [re.sub(r"\s+", " ", text) for text in first.locator("h3").all_inner_texts()]
    assert heads == ["Turn 0+1.500sampled◆ plan", "Turn 1+0.750sampled◆ act"]
    assert first.locator(".reply").all_inner_texts() == ["I look.", "A & B"]
    assert "<script>document.title='taken'</script>" in retry.locator(".reply").nth(1).inner_text()
    assert "Look twice." in retry.get_by_text("addition, ").locator("xpath=..").inner_text()

    grounds = [style(element, "backgroundColor") for element in page.locator(".reply").all()]
    assert [numbers(g)[:3] for g in grounds[:4]] == [[46, 160, 67]] * 2 + [[218, 54, 51]] * 2
    alphas = [numbers(g)[3] for g in (*grounds[:4], grounds[5])]
    assert alphas == pytest.approx([0.45, 0.225, 0.45, 0.45, 0.45], abs=0.005)
    body, ink = numbers(style(page.locator("body"), "backgroundColor")), numbers(style(first, "color"))
    assert (luminance(body) > 0.5) == (scheme == "light")
    for ground in grounds:
        assert contrast(ink, numbers(ground), body) > 7

    examples = first.get_by_text("demonstration: 2 turns").locator("xpath=..").locator("pre")
    assert not examples.is_visible()
    folded = failed.locator("details pre").filter(has_text="word word")
    assert not folded.is_visible()
    failed.get_by_text(re.compile("^observation, ")).click()
    assert folded.is_visible()
    page.screenshot(path=shots / f"rollout-{scheme}.png", full_page=True)
    assert [request.url for request in asked] == [file.as_uri()]
    context.close()

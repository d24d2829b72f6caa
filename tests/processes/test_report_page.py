"""The page in a real browser: what is drawn, on a phone and on a desk, in light and in dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_inputs import write_calibration, write_run

from sparrow_sglang.commands import cli

PHONE, DESK = (390, 844), (1280, 900)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Boxes are in CSS pixels of the page. Colours are those that the browser has computed.
LOOK = """
() => [...document.querySelectorAll("svg.chart")].map(chart => {
  const box = (element) => {
    const { left, right, top, bottom, width, height } = element.getBoundingClientRect();
    return { left, right, top, bottom, width, height };
  };
  const paint = (element) => {
    const style = getComputedStyle(element);
    return style.stroke === "none" ? style.fill : style.stroke;
  };
  const size = (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  return {
    title: chart.querySelector("title").textContent,
    box: box(chart),
    background: getComputedStyle(chart.closest("figure")).backgroundColor,
    texts: [...chart.querySelectorAll("text")].map(
      (text) => ({ text: text.textContent, upright: text.getScreenCTM().b !== 0,
                   size: size(text), colour: getComputedStyle(text).fill, ...box(text) })),
    lines: [...chart.querySelectorAll("[id*='-series-']")].map((line) => {
      const path = line.querySelector("path") ?? line;
      return { colour: paint(path), ...box(path) };
    }),
  };
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on the PATH, of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        # As root, as in containers, Chromium starts only without its sandbox.
        with_args = {"executable_path": path, "args": ["--no-sandbox"]}
        browser = driver.chromium.launch(**with_args)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Path:
    """A page with sections of every kind that has charts."""
    folder = tmp_path_factory.mktemp("results")
    write_run(folder / "run-with-a-long-name-that-has-to-be-broken-somewhere-or-other", 12)
    write_calibration(folder / "calibration", tiny_llama)
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert cli.main(["report", str(folder), "--out", str(out)]) == 0
    return out


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, by WCAG 2."""
    channels = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def overlap(one: dict[str, Any], other: dict[str, Any]) -> float:
    width = min(one["right"], other["right"]) - max(one["left"], other["left"])
    height = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return max(0.0, width) * max(0.0, height)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_what_is_drawn(browser: Any, page_file: Path, size: tuple[int, int], scheme: str) -> None:
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_file.as_uri())
    assert asked == [page_file.as_uri()] and said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width

    charts = page.evaluate(LOOK)
    # Nine of a run, two of a calibration, two of checks.
    assert len(charts) == 13
    for chart in charts:
        title = chart["title"]
        assert chart["box"]["width"] > 250 and chart["box"]["height"] > 150, title
        assert len(chart["texts"]) > 6 and chart["lines"], title
        for text in chart["texts"]:
            assert text["width"] > 0 and text["height"] > 0, (title, text)
            assert text["left"] >= 0 and text["right"] <= width, (title, text)
            assert text["size"] > 9 or text["upright"], (title, text)
            assert contrast(text["colour"], chart["background"]) > 7, (title, text)
        for i, text in enumerate(chart["texts"]):
            for other in chart["texts"][:i]:
                assert overlap(text, other) < 4, (title, text["text"], other["text"])
        for line in chart["lines"]:
            assert line["width"] > 20 and line["height"] > 0.5, (title, line)
            assert chart["box"]["left"] <= line["left"] < line["right"] <= chart["box"]["right"]
            assert chart["box"]["top"] <= line["top"] < line["bottom"] <= chart["box"]["bottom"]
            assert contrast(line["colour"], chart["background"]) > 2.9, (title, line)
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(body) > 0.5) == (scheme == "light")
    context.close()


def test_charts_have_names_and_tables_can_be_opened(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": PHONE[0], "height": PHONE[1]})
    page.goto(page_file.as_uri())
    assert page.get_by_role("img", name="Tail by position and KV budget").count() == 1
    assert page.get_by_role("img", name="Reward", exact=True).is_visible()
    closed = page.locator("details:not([open]) > summary")
    while closed.count():
        closed.first.click()
    # Wide tables scroll in their own box.
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    page.get_by_role("link", name="Calibration of").click()
    assert page.get_by_role("heading", name="Calibration of").is_visible()
    page.close()

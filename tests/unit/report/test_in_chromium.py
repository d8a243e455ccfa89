"""Pages in a real browser: nothing is wider than the window, themes differ, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.records.find import RunFiles
from hpctrain.report.collect import RunReport
from hpctrain.report.run_page import write_page
from hpctrain.report.service_page import write_service_page
from hpctrain.report.service_report import collect_service_report
from tests.chromium import PROGRAM, Chromium
from tests.fabricated_services import NOW, fabricate_service, fabricate_test
from tests.unit.report.conftest import collected

pytestmark = [
    pytest.mark.nightly("a real Chromium"),
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here"),
]

# What is wider than the window and not inside of something that scrolls by itself.
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter(element => {
  const place = element.getBoundingClientRect();
  return (place.right > innerWidth + 1 || place.left < -1) && place.width > 0
    && !element.closest('.table, pre, nav');
}).map(element => `${element.tagName} ${element.textContent.slice(0, 40)}`)
"""
# Texts of axes that leave their card, or lie over each other.
OUTSIDE = """
[...document.querySelectorAll('svg.chart text')].filter(text => {
  const place = text.getBoundingClientRect(), card = text.closest('.card').getBoundingClientRect();
  return place.width > 0 && (place.right > card.right + 1 || place.left < card.left - 1);
}).map(text => text.textContent)
"""
OVERLAPPING = """
[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  const ticks = [...chart.querySelectorAll('text.tick.mid')].filter(
    tick => tick.getBoundingClientRect().width > 0);
  return ticks.slice(1).filter((tick, i) =>
    tick.getBoundingClientRect().left < ticks[i].getBoundingClientRect().right
  ).map(tick => `${chart.getAttribute('aria-label')}: ${tick.textContent}`);
})
"""
COLOURS = """
['body', '.card', 'svg.chart .line', '.heat'].map(name => {
  const style = getComputedStyle(document.querySelector(name));
  return [style.backgroundColor, style.color, style.stroke, style.fill].join(' ');
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, run: RunFiles, other: RunFiles) -> list[Path]:
    """The page of one run, that of two, and that of a service."""
    directory = tmp_path_factory.mktemp("pages")
    one, both, served = (directory / f"{name}.html" for name in ("one", "both", "service"))
    one.write_text(write_page(collected(run)))
    both.write_text(write_page(collected(run, other)))
    service = fabricate_service(directory)
    fabricate_test(service)
    served.write_text(write_service_page(collect_service_report(service, NOW)))
    return [one, both, served]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["one run", "two runs", "a service"])
@pytest.mark.parametrize("width", [400, 768, 1400])
def test_nothing_is_wider_than_the_window(
    browser: Chromium, pages: list[Path], number: int, width: int
) -> None:
    browser.open(pages[number], width=width, dark=False)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(OVERLAPPING) == []


def test_the_themes_have_colours_of_their_own(browser: Chromium, pages: list[Path]) -> None:
    found = []
    for dark in (False, True):
        browser.open(pages[0], width=1000, dark=dark)
        found.append(browser.evaluate(COLOURS))
    light, dark_colours = found
    assert all(one != another for one, another in zip(light, dark_colours, strict=True))
    assert light[0].startswith("rgb(247, 247, 248)") and dark_colours[0].startswith("rgb(15, 17,")


def test_nothing_is_loaded_and_nothing_complains(browser: Chromium, pages: list[Path]) -> None:
    browser.open(pages[1], width=1000, dark=False)
    browser.evaluate("1")
    kinds = {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
    assert [one for one in browser.events if one["method"] in kinds] == []
    loaded = [
        one["params"]["request"]["url"]
        for one in browser.events
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in loaded if not url.startswith("data:")] == [pages[1].as_uri()]


def test_the_policy_stops_a_script_that_gets_into_the_page(
    browser: Chromium, tmp_path: Path, report: RunReport
) -> None:
    """The second line of defence: the first is that nothing gets in."""
    page = tmp_path / "evil.html"
    evil = "<script>document.title = 'taken'</script><img src=x onerror='document.title = 1'>"
    page.write_text(write_page([report]).replace("<main>", f"<main>{evil}"))
    browser.open(page, width=1000, dark=False)
    assert browser.evaluate("document.title") == f"{report.run_id} · hpctrain report"


def test_the_page_is_printed_in_light_colours(browser: Chromium, pages: list[Path]) -> None:
    browser.open(pages[0], width=1000, dark=True)
    browser.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_narrow_charts_have_fewer_ticks(browser: Chromium, pages: list[Path]) -> None:
    shown = """[...document.querySelector('#learning svg.chart').querySelectorAll('.tick')]
        .filter(tick => tick.getBoundingClientRect().width > 0).length"""
    found = []
    for width in (400, 1400):
        browser.open(pages[0], width=width, dark=False)
        found.append(browser.evaluate(shown))
    assert found[0] < found[1]

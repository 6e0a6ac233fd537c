"""The page in headless Chromium: plots are drawn, tables sort and filter, axe finds nothing, and names are text.

Left out where there is no Chromium, or no playwright to drive it: requirements-page.txt (`tox -e page`).
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.page import page
from tests.support.page_rows import HOSTILE, entry, output, raced, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: tox -e page")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

Open = Callable[..., Any]

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a GPU or a sandbox, as where tests run as root in a container."""
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that has all plots, since one that was faster."""
    new, old = run(), output([raced("raced", 1.0)])
    new["benchmarks"].append(raced("raced", 1.5))
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page([("old.json", old), ("new.json", new)]))
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Open]:
    """Open the page; whatever the console says, and whatever is asked of the network, fails the test."""
    contexts = []
    complaints: list[str] = []

    def visit(path: Path = file, fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
        )
        tab.goto(path.as_uri() + fragment)
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def test_every_plot_is_drawn(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    assert all(tab.locator("figure").nth(n).locator("svg, li").count() for n in range(tab.locator("figure").count()))
    plots = tab.locator("figure svg")
    assert plots.count() > 3
    for plot in plots.all():
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box["width"] > 200 and box["height"] > 40
        assert plot.locator("path, line").count() > 3


def unfold(tab: Any) -> None:
    """Open all details."""
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_plot_has_the_colours_of_the_theme(scheme: str, opened: Open) -> None:
    tab = opened(color_scheme=scheme)
    ink, text = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.querySelector('svg text')).fill]"
    )
    assert ink == text


def test_a_column_sorts_by_its_numbers_by_keyboard_too(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    heading = tab.locator("#table-a th", has_text="time ms")
    heading.locator("button").focus()
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    times = column(tab, "time ms")
    assert times == sorted(times) and len(set(times)) > 3
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending" and column(tab, "time ms") == times[::-1]


def column(tab: Any, name: str) -> list[float]:
    """A column of the first question's table."""
    names = tab.locator("#table-a th").all_inner_texts()
    cells = tab.locator(f"#table-a tbody td:nth-child({[each.rstrip(' ▲▼') for each in names].index(name) + 1})")
    return [float(each.split()[0].replace(",", "")) for each in cells.all_inner_texts()]


def test_a_filter_keeps_the_rows_that_have_all_words_and_says_how_many(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    total = tab.locator("#table-a tbody tr").count()
    tab.locator("input[data-filters=table-a]").fill("FLASH s256")
    assert tab.locator("#table-a tbody tr:visible").count() == 1
    assert tab.locator("#announced").inner_text() == f"1 of {total} rows"
    tab.locator("input[data-filters=table-a]").fill("")
    assert tab.locator("#table-a tbody tr:visible").count() == total


def test_all_columns_show_on_demand(opened: Open) -> None:
    tab = opened(java_script_enabled=False)
    section = tab.locator("section", has=tab.locator("#table-a"))
    section.locator("summary", has_text="rows as a table").click()
    heading = tab.locator("#table-a th", has_text="workspace MiB")
    assert not heading.is_visible()
    section.locator("input.every-column").check()
    assert heading.is_visible()


def test_without_javascript_there_is_all_but_sort_and_filter(opened: Open) -> None:
    tab = opened(java_script_enabled=False)
    assert tab.locator("figure svg").first.is_visible()
    tab.locator("section", has=tab.locator("#table-a")).locator("summary", has_text="rows as a table").click()
    assert tab.locator("#table-a tbody tr").first.is_visible()
    assert tab.locator("input[type=search]:visible").count() == 0 and tab.locator("th button").count() == 0
    tab.locator("figure summary").first.click()
    assert tab.locator("table.data").first.is_visible()


def test_a_download_is_the_table(opened: Open) -> None:
    tab = opened()
    tab.locator("figure summary").first.click()
    with tab.expect_download() as started:
        tab.locator("figure button.download").first.click()
    text = Path(started.value.path()).read_text()
    assert len(text.splitlines()) == 1 + tab.locator("table.data").first.locator("tbody tr").count()


def test_cells_of_a_download_are_no_formulas(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([("x", output([entry("=cmd()", {"id": "a"}), entry("-b", {"id": "a"})]))]))
    tab = opened(path)
    unfold(tab)
    with tab.expect_download() as started:
        tab.locator("button.download").last.click()
    lines = Path(started.value.path()).read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["implementation", "'=cmd()", "'-b"]


def test_filter_and_sort_are_in_the_address_and_come_back_from_it(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    tab.locator("input[data-filters=table-a]").fill("flash")
    tab.locator("#table-a th button", has_text="time ms").click()
    tab.locator("#table-a th button", has_text="time ms").click()
    shown = column(tab, "time ms")
    address = tab.evaluate("location.hash")
    again = opened(fragment=address)
    assert again.locator("#table-a tbody tr:visible").count() == 3
    assert column(again, "time ms") == shown and shown[:3] == sorted(shown[:3], reverse=True)
    assert again.locator("#table-a th", has_text="time ms").get_attribute("aria-sort") == "descending"
    again.locator("input[data-filters=table-a]").fill("")
    assert "filter" not in again.evaluate("location.hash")


def test_a_link_to_a_row_or_a_plot_shows_it(opened: Open) -> None:
    tab = opened()
    tab.locator("summary", has_text="More plots").first.click()
    link = tab.locator("figure li a[href^='#row-']:visible").first
    row = link.get_attribute("href")
    link.click()
    assert tab.locator(row).is_visible() and tab.evaluate("location.hash") == row
    folded = opened(fragment="#plot-a-memory-allocated-after-each-stage&filter.table-a=flash")
    plot = folded.locator("#plot-a-memory-allocated-after-each-stage")
    assert plot.is_visible() and 0 <= plot.bounding_box()["y"] < DESKTOP["height"]


def test_a_link_keeps_the_filter_and_the_sort_in_the_address(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    tab.locator("input[data-filters=table-a]").fill("quick")
    link = tab.locator("figure li a[href^='#row-']:visible", has_text="quick").first
    row = link.get_attribute("href")
    link.click()
    assert tab.evaluate("location.hash") == f"{row}&filter.table-a=quick" and tab.locator(row).is_visible()
    background = "(each) => getComputedStyle(each.cells[0]).backgroundColor"
    others = tab.locator(f"#table-a tbody tr:not({row})").first
    assert tab.locator(row).evaluate(background) != others.evaluate(background)
    tab.locator(".permalink:visible").first.click()
    assert tab.evaluate("location.hash").endswith("&filter.table-a=quick")
    assert tab.locator("#table-a tbody tr:visible").count() == 1
    again = opened(fragment=tab.evaluate("location.hash"))
    assert again.locator("#table-a tbody tr").count() > 1
    unfold(again)
    assert again.locator("#table-a tbody tr:visible").count() == 1


def test_figures_show_on_hover_and_on_focus(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    row = tab.locator("figure li", has=tab.locator("a", has_text="quick")).first
    row.hover()
    assert tab.locator("#tip").inner_text().splitlines()[:3] == [
        "quick · raced",
        "5.000 [4.500, 5.500] ms",
        "ratio 0.5 [0.495, 0.505] eager",
    ]
    tab.mouse.move(0, 0)
    assert not tab.locator("#tip").is_visible()
    row.locator("a").focus()
    assert tab.locator("#tip").inner_text().startswith("quick")
    tab.keyboard.press("Escape")
    assert not tab.locator("#tip").is_visible()


def test_arrow_keys_go_from_point_to_point_of_a_plot(opened: Open) -> None:
    tab = opened()
    tab.locator(".panel .scroll").first.focus()
    said = []
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
        said.append(tab.locator("#announced").inner_text())
    assert said[0] == "eager, length 128, 1.28 ms" and len(set(said)) == 3
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#announced").inner_text() == said[1] and tab.locator("#tip").is_visible()


def test_contents_stay_in_sight_on_a_wide_screen(opened: Open) -> None:
    tab = opened()
    unfold(tab)
    tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    box = tab.locator("nav.contents a").first.bounding_box()
    assert tab.evaluate("scrollY") > DESKTOP["height"] and 0 <= box["y"] < DESKTOP["height"]


def test_the_line_of_the_peer_is_straight(opened: Open) -> None:
    """A track is as wide in each row of a plot, whatever its text: places on the axis are in percent of it."""
    for viewport in (PHONE, DESKTOP):
        tab = opened(viewport=viewport)
        unfold(tab)
        found = "[...document.querySelectorAll('.rows')].map((each) => [...each.querySelectorAll('.track')].map("
        found += "(track) => { const box = track.getBoundingClientRect(); return `${box.left} ${box.width}` }))"
        assert all(len(set(tracks)) == 1 for tracks in tab.evaluate(found))


def test_paper_cuts_no_table_and_no_plot(opened: Open) -> None:
    tab = opened(viewport={"width": 703, "height": 1000})  # A4 between margins of 12 mm
    tab.emulate_media(media="print")
    unfold(tab)
    wide = (
        "[...document.querySelectorAll('table, svg, .rows, pre')].filter((each) => each.getBoundingClientRect().right"
    )
    assert tab.evaluate(f"{wide} > innerWidth + 1).map((each) => each.outerHTML.slice(0, 99))") == []
    assert tab.locator("nav.contents").is_hidden() and tab.locator("#table-a tbody tr").first.is_visible()


def test_hostile_names_are_text(opened: Open) -> None:
    tab = opened()
    assert tab.evaluate("window.hacked") is None and tab.locator("img").count() == 0
    assert HOSTILE.partition("\u202e")[0] in " ".join(tab.locator("h2").all_text_contents())


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str, viewport: dict[str, int], opened: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: tox -e page").Axe()
    tab = opened(color_scheme=scheme, viewport=viewport)
    tab.add_style_tag(content="section { content-visibility: visible !important }")  # axe sees what is laid out
    unfold(tab)
    result = axe.run(tab)
    assert result.violations_count == 0, result.generate_report()
    assert len(result.response["passes"]) > 20


def test_a_phone_scrolls_no_page_sideways(opened: Open) -> None:
    tab = opened(viewport=PHONE)
    tab.add_style_tag(content="section { content-visibility: visible !important }")  # or a section would hide it
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


SORT_AND_FILTER = """() => {
  const began = performance.now()
  for (const each of document.querySelectorAll("th button")) if (each.textContent === "time ms") each.click()
  for (const each of document.querySelectorAll("input[type=search]")) {
    each.value = "way1"
    each.dispatchEvent(new Event("input"))
  }
  document.documentElement.getBoundingClientRect()  // lays out
  return performance.now() - began
}"""
"""Milliseconds to sort and filter all tables; one call, as each call waits for a turn of another process."""


@pytest.mark.sweep
def test_two_thousand_rows_are_built_in_5_seconds_open_in_2_and_sort_and_filter_in_half_a_second(
    opened: Open, tmp_path: Path
) -> None:
    """Seconds of this process for the first: another one's are no fault of the page."""
    groups = [f"Question {n}?" for n in range(20)]
    rows = [
        entry(f"way{n % 7}", {"id": f"s{n}-b{n % 3}", "seq": n}, seconds=0.001 * n, group=groups[n % 20])
        for n in range(1, 2001)
    ]
    began = time.process_time()
    text = page([("many.json", output(rows))])
    built = time.process_time() - began
    path = tmp_path / "many.html"
    path.write_text(text)
    tab = opened(path)
    loaded = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    assert tab.locator("section.question tbody tr").count() == 2000
    used = tab.evaluate(SORT_AND_FILTER) / 1000
    assert built <= 5 and loaded <= 2 and used <= 0.5, (built, loaded, used)

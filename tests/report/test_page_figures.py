"""The page's figures are those of the run: in tables, in plots, over several runs, and beside published ones."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardmark.report.changes import changes
from shardmark.report.output import Report
from shardmark.report.page import page, published_page
from shardmark.report.page.figure import Anchors, ticks
from shardmark.report.page.history import history
from shardmark.report.page.lines import lines
from shardmark.report.plots import Automatic, Lines, Published, saved
from shardmark.rows.reader import read_run
from tests.support.page_figures import disagreements
from tests.support.page_rows import LENGTHS, PUBLISHED, entry, output, raced, run

RECORD = Path(__file__).parents[2] / "studies" / "records" / "two-cores-cpu.json.gz"
LARGEST = 1_000_000
"""Bytes of the page of a laptop run."""


def planted() -> dict[str, Any]:
    """The planted run without its hostile row, whose names the page escapes."""
    return run() | {"benchmarks": run()["benchmarks"][:-1]}


def test_every_figure_of_a_page_is_the_runs() -> None:
    assert list(disagreements(page([("planted.json", planted())]), planted())) == []


def test_every_figure_of_the_recorded_runs_page_is_the_runs() -> None:
    record = read_run(RECORD)
    text = page([("record.json", record)])
    assert list(disagreements(text, record)) == []
    assert len(text.encode()) <= LARGEST


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "a median": lambda each: each["stats"].update(median=1.1 * each["stats"]["median"]),
    "a quartile": lambda each: each["stats"].update(q3=1.5 * each["stats"]["q3"]),
    "a ratio": lambda each: each["extra_info"]["time"].update(ratio=1.01 * each["extra_info"]["time"]["ratio"]),
    "an interval": lambda each: each["extra_info"]["time"].update(interval=[0.4, 0.6]),
    "bytes": lambda each: each["extra_info"]["memory"].update(tensors=2**20 + 2**15),
    "a budget": lambda each: each["extra_info"]["memory"].update(budget=2**22),
    "workspace": lambda each: each["extra_info"]["memory"].update(workspace=2**19),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_figure_that_is_not_the_runs_is_seen(wrong: str) -> None:
    other = planted()
    [row] = [each for each in other["benchmarks"] if each["extra_info"]["implementation"] == "quick"]
    WRONG[wrong](row)
    assert list(disagreements(page([("planted.json", planted())]), other))


MOVED = {
    "a point": (r'(data-tip="quick · [^>]*>.*?<b style="left:)([\d.]+)', r"\g<1>33.3"),
    "an end": (r'(data-tip="quick · [^>]*>.*?<i style="left:)([\d.]+)', r"\g<1>22.2"),
    "a bar": (
        r'(data-tip="slow · [^>]*><a[^>]*>slow</a><span class="track bar"[^>]*><i class="k\d" style="width:)[\d.]+',
        r"\g<1>1",
    ),
    "a picture": (r'(<ul class="findings">.*?</span>)0\.50<', r"\g<1>0.51<"),
}


@pytest.mark.parametrize("moved", MOVED)
def test_a_place_that_is_not_the_figures_is_seen(moved: str) -> None:
    text = page([("planted.json", planted())])
    other, count = re.subn(*MOVED[moved], text, count=1, flags=re.S)
    assert count == 1 and list(disagreements(text, planted())) == []
    assert len(list(disagreements(other, planted()))) == 1


def test_each_point_of_a_line_says_the_rows_figure() -> None:
    rows = [each for each in run()["benchmarks"] if "seq" in each["extra_info"]["case"]]
    tips = [
        html.unescape(each) for each in re.findall(r'data-tip="((?:eager|flash) \| length[^"]*)"', page([("a", run())]))
    ]
    names = [(each["extra_info"]["implementation"], each["extra_info"]["case"]["seq"]) for each in rows]
    medians = [f"{each['stats']['median'] * 1e3:.4g}" for each in rows]
    assert sorted(tips) == sorted(
        f"{name} | length {seq} | {median} ms" for (name, seq), median in zip(names, medians, strict=True)
    )


def test_a_table_under_lines_has_the_rows_figures() -> None:
    rows = [each for each in run()["benchmarks"] if "seq" in each["extra_info"]["case"]]
    measured = [row for row in lines(LENGTHS, rows).rows if row[0] != "roofline"]  # type: ignore[union-attr]
    assert measured == [
        [
            each["extra_info"]["implementation"],
            each["extra_info"]["case"]["seq"],
            pytest.approx(1e3 * each["stats"]["median"]),
        ]
        for each in rows
    ]


def test_lines_that_coincide_are_told_apart() -> None:
    plot = Lines("Time", "case.seq", "stats.median", "s", "length", "time")

    def drawn(factor: float) -> Any:
        rows = [
            entry(name, {"id": f"s{seq}", "seq": seq}, seq * 1e-5 * each)
            for name, each in (("eager", 1.0), ("flash", factor))
            for seq in (128, 512)
        ]
        return lines(plot, rows)

    dashes = [mark.mark.strokeDashOffset for mark in drawn(1.0001).panels[0][1].layer if mark.mark.type == "line"]
    assert dashes == [0, -8] and any("coincide" in note for note in drawn(1.0001).notes)
    assert not any("coincide" in note for note in drawn(2.0).notes)


def test_a_list_in_a_row_is_a_line() -> None:
    rows = [entry(name, {"id": "a"}, losses=found) for name, found in (("early", [7.0, 7.0]), ("late", [7.0, 6.5]))]
    drawn: Any = lines(Lines("Loss by step", "", "losses", x_title="step", log_y=False), rows)
    assert drawn.rows == [["early", 1, 7.0], ["early", 2, 7.0], ["late", 1, 7.0], ["late", 2, 6.5]]


def test_labels_of_lines_do_not_cover_one_another() -> None:
    rows = [entry(f"way{n}", {"id": f"s{seq}", "seq": seq}, seq * 1e-5 * 1.01**n) for n in range(9) for seq in (1, 9)]
    figure: Any = lines(LENGTHS, [each | {"extra_info": each["extra_info"] | {"limit": {}}} for each in rows])
    texts = re.findall(r"translate\((?:[\d.]+),(-?[\d.]+)\)[^>]*>way\d<", page_of(figure))
    places = sorted(map(float, texts))
    assert len(places) == 9 and all(b - a > 12 for a, b in pairwise(places))


def page_of(figure: Any) -> str:
    """The SVG of a figure's first panel."""
    from shardmark.report.page.vega import draw

    return draw(figure.panels[0][1], "plot", "title", "description", figure.names)


def test_a_row_raced_against_another_peer_stands_at_the_quotient_of_the_times() -> None:
    rows = [entry("eager", {"id": "raced"}), raced("quick", 0.5), raced("slow", 2.0), raced("second", 0.5)]
    rows[3]["extra_info"]["time"] |= {"peer": "slow"}
    rows[3]["stats"] |= {"median": 0.01, "q1": 0.009, "q3": 0.011}
    text = page([("a", output(rows))])
    assert "<h3>raced · beside eager</h3>" in text
    places = dict(re.findall(r'class="name">(\w+)</a>.*?<b style="left:([\d.]+)%', text))
    assert places["second"] == places["eager"] and ">0.5 [0.495, 0.505] slow<" in text


def test_ids_say_what_they_name_and_are_of_one_element() -> None:
    anchors = Anchors()
    assert [anchors("row", "t[a-b]"), anchors("row", "t[a b]")] == ["row-t-a-b", "row-t-a-b--2"]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.8, 1.3), [0.8, 1.0, 1.2]),
        ((0.1, 2.0), [0.1, 0.2, 0.5, 1, 2]),
        ((1e-3, 1e3), [10.0**n for n in range(-3, 4)]),
    ],
)
def test_an_axis_has_round_ticks(ends: tuple[float, float], expected: list[float]) -> None:
    assert ticks(ends) == pytest.approx(expected)


def test_an_unknown_plot_is_an_error() -> None:
    with pytest.raises(ValueError, match="no plot is called 'pies', only times, memory"):
        Automatic("pies")


def runs(*ratios: float) -> list[tuple[str, Any]]:
    return [(f"{n}.json", output([raced("mine", ratio), raced("same", 1.0)])) for n, ratio in enumerate(ratios)]


def test_a_history_marks_the_run_in_which_a_figure_changed() -> None:
    given = runs(1.0, 1.3, 1.3, 0.9)
    steps = [changes(given[n][1], given[n + 1][1], given[n][0]) for n in range(3)]
    changed, same = history(given, steps)
    assert changed.ratio is not None and same.ratio is not None and changed.memory is None
    assert [mark.change for mark in changed.ratio.marks] == ["", "worse", "", "better"]
    assert [mark.change for mark in same.ratio.marks] == [""] * 4
    assert changed.ratio.said == "1 [0.99, 1.01] eager → 0.9 [0.891, 0.909] eager"
    heights = [mark.y for mark in changed.ratio.marks]
    assert heights[1] == heights[2] < heights[0] < heights[3]


def test_a_history_breaks_where_the_peer_changes() -> None:
    given = runs(1.0, 0.9, 0.5, 0.6)
    for _, run_of in given[2:]:
        run_of["benchmarks"][0]["extra_info"]["time"]["peer"] = "other"
    mine, same = history(given, [])
    assert mine.ratio is not None and same.ratio is not None
    assert mine.ratio.line.count("M") == mine.ratio.band.count("Z") == 2 and same.ratio.line.count("M") == 1


def test_a_case_of_many_rows_shows_the_fastest_and_says_so() -> None:
    others = [raced(f"way{n}", 2.0 - n / 200) for n in range(300)]
    text = page([("a", output([entry("eager", {"id": "raced"}), *others]))])
    [plot] = re.findall(r"<figcaption>Time beside the peer.*?</figure>", text, re.S)
    names = re.findall(r'class="name">(\w+)</a>', plot)
    assert names == [f"way{n}" for n in range(299, 299 - 48, -1)]
    assert "beside eager: the 48 fastest of 301 rows; the table has all." in html.unescape(plot)


def test_a_negative_time_is_drawn_as_0_and_said() -> None:
    parts = {"forward": 0.02, "backward": 0.01, "communication": -0.004}
    rows = [entry(name, {"id": "parts"}, time={"parts": parts}) for name in ("one", "two")]
    text = page([("a", output(rows))])
    [plot] = re.findall(r"<figcaption>Where the step.*?</figure>", text, re.S)
    assert "width:-" not in plot and "forward 67%, backward 33%" in plot
    assert "communication -4.000 ms" in plot and "drawn as 0" in plot


def test_two_kinds_have_two_colours() -> None:
    mixed = [each for each in run()["benchmarks"] if each["extra_info"]["implementation"] in ("observed", "eager")]
    curve = [{"parameters": 2**19, "gradients": 2**19}]
    mixed.append(entry("kinds", {"id": "kinds"}, memory={"curve": curve}))
    text = page([("a", output(mixed))])
    [legend] = re.findall(r'<figcaption>Peak memory.*?<p class="legend">(.*?)</p>', text, re.S)
    colours = re.findall(r'class="(k\d)"></i>(\w+)', legend)
    assert len(colours) >= 3 and len(dict(colours)) == len(colours)


@pytest.mark.parametrize("published", [(), PUBLISHED.published])
def test_points_without_published_figures_are_in_their_section(published: tuple[Published, ...]) -> None:
    one = output([entry("eager", {"id": "a"}), entry("quick", {"id": "a"})])
    one["questions"][0]["plots"] = [saved(replace(PUBLISHED, published=published))]
    assert ("<figcaption>Ours and published <" in page([("a", one)])) == (not published)


def test_the_note_says_which_part_communication_is_in() -> None:
    def drawn(ranks: int, **parts: float) -> str:
        rows = [entry(name, {"id": "a"}, time={"parts": {"forward": 1.0, "backward": 2.0, **parts}}) for name in "ab"]
        return page(
            [("a", output([each | {"extra_info": each["extra_info"] | {"world_size": ranks}} for each in rows]))]
        )

    own, within = "time that it adds to the step", "communication is in the part that waits for it"
    assert own in drawn(2, communication=0.1) and within not in drawn(2, communication=0.1)
    assert within in drawn(2) and own not in drawn(2)
    assert within not in drawn(1) and own not in drawn(1)


def test_a_row_that_a_run_lacks_has_a_history_of_the_others() -> None:
    given = runs(1.0, 1.1, 1.2)
    del given[1][1]["benchmarks"][0]
    [found] = [each for each in history(given, []) if each.name.startswith("mine")]
    assert found.ratio is not None and [mark.tip.partition(" ")[0] for mark in found.ratio.marks] == [
        "0.json",
        "2.json",
    ]


def test_published_figures_are_on_a_page_of_their_own_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    report = Report(path)
    report.write([("a.json", run())])
    report.close()
    own, other = path.read_text(), (tmp_path / "out-published.html").read_text()
    assert 'href="out-published.html"' in own and "8 GPUs of another kind" not in own
    assert "8 GPUs of another kind" in other and 'href="out.html"' in other
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out-published.html", "out.html"]


def test_without_published_figures_there_is_no_such_page() -> None:
    bare = run()
    bare["questions"][0]["plots"] = []
    assert published_page(("a.json", bare), "out.html") is None


def test_the_page_of_two_hundred_rows_is_at_most_a_megabyte() -> None:
    rows = [
        each
        for n in range(20)
        for seq in (128, 256, 512)
        for each in (
            entry("eager", {"id": f"b{n}-s{seq}", "seq": seq}, seq * 1e-5, group=f"Question {n}?"),
            entry("flash", {"id": f"b{n}-s{seq}", "seq": seq}, seq * 2e-5, group=f"Question {n}?"),
            entry("fused", {"id": f"b{n}-s{seq}", "seq": seq}, seq * 3e-5, group=f"Question {n}?"),
        )
    ]
    assert len(rows) == 180
    assert len(page([("a", output(rows))]).encode()) <= LARGEST

"""The page: every plot and row is in it, names are text, nothing is loaded, and what cannot be shown is one line."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardmark.report.__main__ import main
from shardmark.report.changes import changes
from shardmark.report.output import Report
from shardmark.report.page import page
from shardmark.report.plots import MEMORY, restored, saved
from tests.support.page_rows import BUCKETS, HOSTILE, LENGTHS, PUBLISHED, TITLES, entry, output, predicted, raced, run
from tests.support.planted_rows import figures
from tests.support.planted_rows import planted as planted
from tests.support.planted_rows import run as play

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def drawn() -> str:
    """The page of a run that has all plots."""
    return page([("planted.json", run())])


class Tags(HTMLParser):
    """Every attribute of every tag, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def write(folder: Path, name: str, value: Any) -> str:
    """That run's file."""
    (folder / name).write_text(json.dumps(value))
    return str(folder / name)


@pytest.mark.parametrize("title", TITLES)
def test_each_plot_is_there_with_its_figures_as_text(title: str, drawn: str) -> None:
    """A drawing has a table of its figures; points and bars have them beside each row, which they link to."""
    figures = re.findall(r"<figure.*?</figure>", drawn, re.S)
    figures = [each for each in figures if f"<figcaption>{title} <" in html.unescape(each)]
    assert figures
    for figure in figures:
        if "<svg" in figure:
            assert 'role="img"' in figure and "<table" in figure and 'class="download"' in figure
        else:
            assert 'href="#row-' in figure and re.search(r'class="(ratio|time)">[^<]*\d', figure)


def test_a_question_shows_one_plot_and_the_one_it_names_comes_first() -> None:
    rows = [entry("eager", {"id": "raced"}), raced("quick", 0.5)]
    for plots, first in (([], "Time beside the peer's"), ([saved(MEMORY)], "Peak memory")):
        asked = output(rows)
        asked["questions"][0]["plots"] = plots
        [section] = re.findall(
            r'<section class="question" aria-labelledby="question-a">.*?</section>', page([("a", asked)]), re.S
        )
        at_first = html.unescape(section.partition("<summary>More plots")[0])
        assert re.findall(r"<figcaption>(.*?) <a", at_first) == [first]


def test_every_row_is_there(drawn: str) -> None:
    names = [row["extra_info"]["implementation"].partition("\u202e")[0] for row in run()["benchmarks"]]
    tables = html.unescape(" ".join(re.findall(r"<table id=.*?</table>", drawn, re.S)))
    assert all(name in tables for name in names)


def test_first_come_the_verdict_the_machine_what_failed_and_the_findings(drawn: str) -> None:
    first = html.unescape(drawn.partition('<section class="question"')[0])
    places = [first.index(each) for each in ('class="verdict"', "a CPU", "failed large: peak 3 MiB\n", 'id="findings"')]
    assert places == sorted(places) and "of 2 MiB <b>at most</b></pre>" in first
    assert '<p class="answer">42</p>' in drawn
    assert "<b>" not in drawn and "a line\ntwo</pre>" in drawn


def test_it_says_that_the_machine_was_busy() -> None:
    rows = [entry(f"n{n}", {"id": "a"}, time={"machine": {"waited": 0.5}}) for n in range(2)]
    text = html.unescape(page([("x", output(rows))]))
    assert "<p>the machine was busy: 2 of 2 rows waited for a core</p>" in text


def test_hostile_names_are_text(drawn: str) -> None:
    assert drawn.count("<script>") == 1  # the page's own
    assert "<img" not in drawn and "{{7*7}}" in drawn  # nothing of it was obeyed
    assert all(each.isprintable() or each == "\n" for each in drawn)
    rows = [entry(f"{HOSTILE}{n}", {"id": f"x{seq}", "seq": seq}) for n in range(2) for seq in (1, 2)]
    text = page([("x", output(rows))])
    assert "&lt;/title&gt;&lt;script&gt;" in "".join(re.findall(r'<div class="rows".*?</div>', text, re.S))
    plots = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert "&lt;/title&gt;&lt;script&gt;" in plots and "<script" not in plots


def test_the_page_loads_nothing(drawn: str) -> None:
    found = Tags()
    found.feed(drawn)
    loading = ("src", "srcset", "href", "xlink:href", "action", "data", "poster")
    links = {value for tag, name, value in found.attributes if name in loading}
    assert {link.partition(":")[0] if ":" in link else link[0] for link in links} <= {"data", "#"}, "no other file"
    styles = [value for _, name, value in found.attributes if name in ("style", "fill", "stroke", "clip-path")]
    assert not any("url(" in each.replace("url(#", "") for each in styles)
    assert "default-src 'none'" in drawn


def test_ids_are_of_one_element_each(drawn: str) -> None:
    ids = re.findall(r'\sid="([^"]*)"', drawn)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("plot", [LENGTHS, BUCKETS, PUBLISHED, MEMORY])
def test_a_declared_plot_comes_back_from_json(plot: Any) -> None:
    assert restored(json.loads(json.dumps(saved(plot)))) == plot


def test_rows_of_one_size_draw_no_line_and_the_page_says_so() -> None:
    text = page([("x", output([entry("eager", {"id": "s1", "seq": 1}), entry("flash", {"id": "s1", "seq": 1})]))])
    assert "Not drawn: Time by length. It takes rows of two values of length or more." in text


def test_a_run_that_says_nothing_of_its_questions_is_shown() -> None:
    older = run()
    del older["questions"]
    assert "Peak memory" in page([("older.json", older)])


def test_answers_that_are_the_same_in_every_run_stand_below_and_folded() -> None:
    derived = run()
    saved = {"text": "How much is twice three?", "short": None, "columns": [], "plots": []}
    derived["questions"].append({**saved, "answer": "six", "lines": ["2 x 3", "= 6"]})
    text = page([("a.json", derived)])
    always = text.partition('<h2 id="always">')[2]
    assert '<p class="answer">six</p>' in always and "2 x 3\n= 6</pre>" in always
    assert text.count("How much is twice three?") == 2 and "<summary>How much is twice three?</summary>" in always


def test_two_runs_are_compared_with_intervals() -> None:
    old = output([raced("slower", 1.0), raced("faster", 1.0), raced("same", 1.0), raced("larger", 1.0)])
    new = output([raced("slower", 1.3), raced("faster", 0.7), raced("same", 1.0), raced("larger", 1.0, 2**21)])
    found = changes(old, new, "old.json")
    assert [(row[0], row[1].partition("[")[2].partition("-")[0], row[2]) for row in found.rows] == [
        ("slower or larger", "slower", "time"),
        ("slower or larger", "larger", "memory"),
        ("faster or smaller", "faster", "time"),
    ]
    assert "1.300x the time in old.json, beside eager, 99.9% interval [1.274, 1.326]" in found.rows[0][3]
    text = page([("old.json", old), ("new.json", new)])
    assert "What has changed since old.json" in text and "History over 2 runs" in text


def unmeasured(name: str, why: str | None) -> dict[str, Any]:
    """The row of a test that was to be measured and was not."""
    return entry(name, {"id": "raced"}, verdict="out of memory", why=why) | {"stats": None}


def test_what_was_measured_and_no_longer_is_stands_among_what_is_worse() -> None:
    old = output([raced("kept", 1.0), raced("lost", 1.0), raced("mute", 1.0)])
    old["unmeasured"] = [unmeasured("never", "on rank 0: no room")]
    new = output([raced("kept", 1.0)])
    new["unmeasured"] = [unmeasured("lost", "on rank 1: no room\nmore"), unmeasured("mute", None), *old["unmeasured"]]
    found = changes(old, new, "old.json")
    assert [(row[0], row[2], row[3]) for row in found.rows] == [
        ("slower or larger", "verdict", "out of memory, measured in old.json: on rank 1: no room"),
        ("slower or larger", "verdict", "out of memory, measured in old.json"),
    ]
    assert found.counts[-2:] == ["0 rows new.", "0 rows gone."]
    assert "on rank 1: no room" in page([("old.json", old), ("new.json", new)])


def test_predicted_times_stand_beside_measured_ones() -> None:
    """The plot has only tests of both runs; "What has changed" compares only two runs of one kind."""
    simulated = output([predicted(name, 0.02, simulated=True) for name in ("both", "only")])
    measured = output([entry("both", {"id": "predicted"}, 0.025)])
    for runs in ([("a.json", simulated), ("b.json", measured)], [("b.json", measured), ("a.json", simulated)]):
        text = page(runs)
        assert f"Predicted beside measured: {runs[0][0]}" in text and "has changed" not in text
        [figure] = re.findall(r"<figcaption>Predicted beside measured <.*?</figure>", text, re.S)
        assert "-20.0%" in figure and "[both-" in html.unescape(figure) and "[only-" not in html.unescape(figure)
    text = page([("a.json", simulated), ("c.json", output([entry("another", {"id": "s"}, 0.1)]))])
    assert "No test has a predicted time in one run" in text


def test_two_predicted_runs_are_compared_in_memory() -> None:
    old, new = (output([predicted("a", 0.02, simulated=True)]) for _ in range(2))
    new["benchmarks"][0]["extra_info"]["memory"]["tensors"] *= 2
    text = page([("old.json", old), ("new.json", new)])
    assert "What has changed since old.json" in text and "1 slower or larger" in text


def test_what_fits_stands_with_the_fastest_first() -> None:
    rows = [predicted("slow", 0.03), predicted("large", 0.01, 2**22), predicted("fast", 0.02)]
    [table] = re.findall(r'<h2 id="fits">.*?</section>', page([("a.json", output(rows))]), re.S)
    cells = re.findall(r"<td[^>]*>([^<]*)", table)
    assert [cells[i] for i in range(0, len(cells), 7)] == ["planted=fast", "planted=slow", "planted=large"]
    assert cells[2:7] == ["20.000", "1.00", "1.00", "1.00", "yes"] and cells[-2:] == ["-2.00", "no"]
    assert 'id="fits"' not in page([("a.json", output([entry("real", {"id": "s"}, 0.1)]))])


def test_what_is_new_and_what_is_gone_is_named() -> None:
    old, new = output([raced("kept", 1.0), raced("gone", 1.0)]), output([raced("kept", 1.0)])
    new["benchmarks"] += [raced(f"new{n}", 1.0) for n in range(12)]
    counts = changes(old, new, "old.json").counts
    gone = old["benchmarks"][1]["fullname"].removeprefix("perf/")
    assert counts[-1] == f"1 row gone: {gone}."
    assert counts[-2].startswith("12 rows new: test_planted.py::test_planted[new0-") and "[new9-" in counts[-2]
    assert "[new10-" not in counts[-2] and counts[-2].endswith(", 2 more.")


def test_times_of_another_machine_are_not_compared() -> None:
    old, new = output([raced("slower", 1.0)]), output([raced("slower", 1.3)])
    old["machine_info"] = old["machine_info"] | {"cores": 64}
    found = changes(old, new, "old.json")
    assert found.rows == [] and "Times are not compared: old.json is of " in found.counts[0]


RACED, NO_RATIO, UNKNOWN_PLOT, NO_TITLE = output([raced("slower", 1.0)]), output([raced("slower", 1.0)]), run(), run()
NO_RATIO["benchmarks"][0]["extra_info"]["time"]["pairs"]["peer"]["ratio"] = None
UNKNOWN_PLOT["questions"][0]["plots"][0]["kind"] = "Pies"
NO_TITLE["questions"][0]["plots"][0]["title"] = {"a": 1}
NO_NUMBER = "is of another version of this suite (TypeError: None is no number that was measured)"
REFUSED = {
    "foreign": ([{"benchmarks": []}], "0.json has no rows that a run of this suite"),
    "unknown plot": ([UNKNOWN_PLOT], "0.json is of another version of this suite (KeyError: 'Pies')"),
    "no title": ([NO_TITLE], "0.json is of another version of this suite (TypeError: Lines.title is of type dict)"),
    "no ratio before": ([NO_RATIO, RACED], NO_NUMBER),
    "no ratio now": ([RACED, NO_RATIO], NO_NUMBER),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_one_line_and_exit_status_4(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, reason = REFUSED[name]
    files = [write(tmp_path, f"{n}.json", each) for n, each in enumerate(runs)]
    assert main([*files, "-o", str(tmp_path / "out.html")]) == 4
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("path", ["none/out.html", "out.pdf"])
def test_a_report_that_cannot_be_written_is_one_line(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path, "a.json", run()), "-o", str(tmp_path / path)]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_writes_the_page_and_prints_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "a.json", run()), "-o", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}\n"
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")


def test_a_run_writes_its_page_and_says_so_in_its_last_line(planted: pytest.Pytester) -> None:
    result = play(planted, "--report=page.html", a=figures(), b=figures(ratio=2.0))
    assert result.outlines[-1] == "page.html"
    text = (planted.path / "page.html").read_text()
    assert "What ran where" in text and "Time beside the peer" in text
    assert [path.name for path in planted.path.glob(".page*")] == []


def test_a_page_that_cannot_be_written_in_the_end_fails_the_run(
    planted: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "write", Mock(side_effect=OSError(28, "No space left on device")))
    result = play(planted, "--report=page.html", a=figures())
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.outlines[-1] == "--report page.html: OSError: [Errno 28] No space left on device"


def test_without_rows_there_is_no_page(planted: pytest.Pytester) -> None:
    result = play(planted, "--report=page.html", "-k", "nothing", a=figures())
    assert result.outlines[-1] == "--report: no report, as nothing was measured"
    assert not (planted.path / "page.html").exists()

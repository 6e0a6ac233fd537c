"""Figures that a page shows, read back from its HTML, beside those of the run: each disagreement is a line.

Cells and texts are made again from the rows by arithmetic of their own, and places on an axis are read by its ticks.
"""

import math
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

from shardmark.report.page.figure import Anchors

PLACES = 2e-3
"""Largest relative error of a figure that is read from a place in thousandths of a percent, between printed ticks."""


def disagreements(html: str, run: dict[str, Any]) -> Iterator[str]:
    """One line for each figure of a table or a plot that is not the row's."""
    entries = [entry for each in ("benchmarks", "unmeasured") for entry in run.get(each, ())]
    anchors = Anchors()
    order: dict[Any, list[dict[str, Any]]] = {}
    for entry in entries:
        order.setdefault(entry["group"], []).append(entry)
    rows: dict[str, dict[str, Any]] = {}
    for group in order.values():
        cases: dict[str, list[dict[str, Any]]] = {}
        for entry in group:
            cases.setdefault(entry["extra_info"]["case"]["id"], []).append(entry)
        for entry in (each for same in cases.values() for each in same):
            rows[anchors("row", entry["name"].removeprefix("test_"))] = entry
    yield from _tables(html, rows)
    yield from _points(html, rows)
    yield from _bars(html, rows)


def expected(entry: dict[str, Any]) -> dict[str, str]:
    """The cells of a row in the columns whose figures plots have too."""
    row, stats = entry["extra_info"], entry["stats"]
    time, memory = row["time"], row["memory"]
    cells = {"implementation": row["implementation"], "case": row["case"]["id"]}
    if stats and "predicted" not in time:
        median, low, high = (_ms(stats[name]) for name in ("median", "q1", "q3"))
        cells["time ms"] = f"{median} [{low}, {high}]"
    if time.get("ratio") is not None:
        ends = f" [{time['interval'][0]:.3g}, {time['interval'][1]:.3g}]" if time["interval"] else ""
        cells["ratio to peer"] = f"{time['ratio']:.3g}{ends} {time['peer']}"
    if "tensors" in memory and "needed" not in memory:
        cells["tensors MiB"] = f"{memory['tensors'] / 2**20:,.2f}"
    if memory.get("budget") is not None and "needed" not in memory:
        cells["budget MiB"] = f"{memory['budget'] / 2**20:,.2f}"
    return cells


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def _tables(html: str, rows: dict[str, Any]) -> Iterator[str]:
    """Every row is there, with its figures."""
    found = {}
    for table in re.findall(r'<table id="table-.*?</table>', html, re.S):
        names = [unescape(each) for each in re.findall(r"<th [^>]*>(.*?)</th>", table)]
        for anchor, row in re.findall(r'<tr id="([^"]+)">(.*?)(?=<tr id=|</t)', table, re.S):
            cells = [unescape(re.sub("<[^>]*>", "", each)) for each in re.split(r"<td[^>]*>", row)[1:]]
            found[anchor] = dict(zip(names, cells, strict=True))
    for anchor, entry in rows.items():
        if anchor not in found:
            yield f"{anchor} is not on the page"
            continue
        for name, text in expected(entry).items():
            if found[anchor].get(name) != text:
                yield f"{anchor}: {name} is {found[anchor].get(name)!r} in the table, {text!r} in the run"


def _plots(html: str, title: str) -> Iterator[str]:
    for figure in re.findall(r'<figure id="plot-.*?</figure>', html, re.S):
        if re.search(rf"<figcaption>{re.escape(title)} <", unescape(figure)):
            yield figure


def _items(plot: str) -> Iterator[tuple[str, str, str, str]]:
    """(heading, kind, row's anchor, HTML) of each row of a plot."""
    for heading, group in re.findall(r"(?:<h4>([^<]*)</h4>\n)?<ul>\n(.*?</ul>)", plot, re.S):
        for kind, item in re.findall(r'<li(?: class="(\w+)")? data-tip="[^"]*">(.*?)(?=\n<li|\n</ul>)', group, re.S):
            if link := re.search(r'href="#([^"]+)"', item):
                yield unescape(heading), kind, link[1], item


def _points(html: str, rows: dict[str, Any]) -> Iterator[str]:
    """Each point is at the row's ratio or time, its bar from one end of the interval to the other."""
    for title in ("Time beside the peer's", "Time"):
        for plot in _plots(html, title):
            ticks = re.findall(r'<span style="left:([\d.]+)%">([^<]+)</span>', plot)
            axis = [(float(place), float(text)) for place, text in (ticks[0], ticks[-1])]
            for heading, kind, anchor, item in _items(plot):
                yield from _point(heading, kind, anchor, item, rows[anchor], axis)


def _point(heading: str, kind: str, anchor: str, item: str, entry: Any, axis: Any) -> Iterator[str]:
    time, stats, cells = entry["extra_info"]["time"], entry["stats"], expected(entry)
    ratio, median = re.findall(r'<span class="(?:ratio|time)">([^<]*)</span>', item)
    if median != f"{_ms(stats['median'])} ms":
        yield f"{anchor}: {median!r} beside the point, the median is {_ms(stats['median'])} ms"
    if kind == "raced" and unescape(ratio) != cells["ratio to peer"]:
        yield f"{anchor}: {ratio!r} beside the point, {cells['ratio to peer']!r} in the run"
    places = [float(place) for place in re.findall(r'<b style="left:([\d.]+)%', item)]
    ends = re.findall(r'<i style="left:([\d.]+)%;right:([\d.]+)%', item)
    places += [place for low, high in ends for place in (float(low), 100 - float(high))]
    if kind == "alone":
        values = [stats["median"] * 1e3, *(stats[each] * 1e3 for each in ("q1", "q3") if ends)]
    elif kind == "raced" and heading.endswith(f"1 is {time['peer']}"):
        values = [time["ratio"], *((time["interval"] or []) if ends else [])]
    else:
        return
    for place, value in zip(places, values, strict=True):
        yield from _same(anchor, place, value, axis)


def _same(anchor: str, place: float, value: float, axis: Any) -> Iterator[str]:
    """The figure at a place of a logarithmic axis; one at its end is beyond it."""
    (one, low), (other, high) = axis
    if 0 < place < 100 and one != other:
        read = low * (high / low) ** ((place - one) / (other - one))
        if not math.isclose(read, value, rel_tol=PLACES):
            yield f"{anchor}: {read:.4g} by its place, {value:.4g} in the run"


def _bars(html: str, rows: dict[str, Any]) -> Iterator[str]:
    """Tensors and workspace are as long, beside the budget's tick, as their bytes."""
    for plot in _plots(html, "Peak memory"):
        for _, _, anchor, item in _items(plot):
            memory, cells = rows[anchor]["extra_info"]["memory"], expected(rows[anchor])
            text = " of ".join(cells[name] for name in ("tensors MiB", "budget MiB") if name in cells) + " MiB"
            [shown] = re.findall(r'<span class="ratio">([^<]*)', item)
            if shown != text:
                yield f"{anchor}: {shown!r} beside the bar, {text!r} in the run"
            widths = [float(each) for each in re.findall(r'style="width:([\d.e-]+)%', item)]
            if tick := re.search(r'<b style="left:([\d.]+)%', item):
                drawn = sum(widths) / float(tick[1]) * memory["budget"]
                whole = memory["tensors"] + (memory["workspace"] or 0)
                if not math.isclose(drawn, whole, rel_tol=PLACES):
                    yield f"{anchor}: a bar of {drawn:,.0f} bytes, {whole:,.0f} in the run"

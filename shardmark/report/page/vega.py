"""Charts by Altair, drawn by Vega-Lite: a chart in, an SVG out that follows the page's colours.

Altair only writes the specification. `vl-convert-python` is Vega-Lite itself with an engine to run it, so the page
needs no script to show a plot and loads none. It draws a plot in a tenth of a second and leaves room for names of any
length. Alternatives that were tried: matplotlib, which draws this suite's documents, takes five times as long, more
than a page of 2,000 rows may take, and finds room for names only by laying out each plot twice. Plotly and ECharts draw
in the reader's browser: more than a megabyte before the first figure, and nothing without JavaScript. uPlot is small,
but draws on a canvas, which neither a theme's colours nor a screen reader reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import altair as alt

Chart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.FacetChart

SERIES = [f"var(--series-{i})" for i in range(8)]
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
_MARK = "\N{SOFT HYPHEN}"
"""A character that every font has and no name contains: `printable` replaces it by its code."""

DASH = "M-1,-0.2H1V0.2H-1Z"
"""The symbol of a line without points."""

INK, FAINT, BACKGROUND = "var(--ink)", "var(--rule)", "var(--surface)"

_CONFIG: dict[str, Any] = {
    "aria": False,  # a label for every mark would take a tenth of the time
    "background": None,
    "font": "Arial",
    "view": {"stroke": None},
    "range": {"category": SERIES},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": FAINT,
        "domainColor": FAINT,
        "ticks": False,
        "labelPadding": 6,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 0,
    },
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "labelFontWeight": "bold", "title": None},
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "orient": "bottom",
        "direction": "horizontal",
        "columns": 4,
        "labelLimit": 0,
        "symbolStrokeColor": INK,
    },
    "text": {"color": INK, "fontSize": 12},
    "point": {"opacity": 1},
    "tick": {"opacity": 1},
    "rule": {"color": INK},
}


def chart(data: Iterable[Mapping[str, Any]]) -> alt.Chart:
    """A chart of these records, without marks."""
    return alt.Chart(alt.InlineData(tuple(data)))  # not a list, which Altair copies value by value for each layer


def names_axis(field: str, names: Sequence[str], width: float | None, **axis: Any) -> alt.Y:
    """One line for each name, from top to bottom, whether it has a mark or not; names take `width` pixels.

    Without a width there is no axis, as in a panel whose left neighbour has it.
    """
    shown = None if width is None else alt.Axis(title=None, minExtent=width, **axis)
    return alt.Y(f"{field}:N", sort=None, scale=alt.Scale(domain=list(names)), axis=shown)


def color(field: str, kinds: Sequence[str], colors: Sequence[str], **legend: Any) -> alt.Color:
    """A colour for each kind, and their legend."""
    scale = alt.Scale(domain=list(kinds), range=list(colors))
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(title=None, **legend))


def series(count: int) -> list[tuple[str, str]]:
    """`count` pairs of colour and shape, so that no two lines differ by colour alone; 64 pairs are distinct."""
    return [(SERIES[i % 8], _SHAPES[(i + i // 8) % 8]) for i in range(count)]


def stand_ins(names: Iterable[str]) -> dict[str, str]:
    """A short stand-in for each of an axis's names; `draw` puts the names back.

    Vega measures each name several times, and takes a tenth of a millisecond for each of its characters: with the names
    themselves a plot of 40 rows takes five times as long.
    """
    return {name: f"{_MARK}{place}" for place, name in enumerate(names)}


def room(names: Iterable[str]) -> float:
    """Pixels that the longest name takes, plus a margin."""
    return 10 + max(sum(6.2 if character.isascii() else 12 for character in name) for name in names)


def draw(drawn: Chart, name: str, title: str, description: str, names: Sequence[str] = ()) -> str:
    """The SVG of a chart.

    `name` begins the ids of its title and description; no other plot may have it. `names` are the ones whose stand-ins
    the chart has.
    """
    from vl_convert import vegalite_to_svg  # an engine of its own, that only a page needs

    text = vegalite_to_svg({**drawn.to_dict(validate=False), "config": _CONFIG})
    opening, _, body = text.partition(">")
    width, height = (float(found) for found in re.findall(r'(?:width|height)="([\d.]+)"', opening)[:2])
    body = body.replace(' aria-label="', ' data-tip="')  # shown by page.js: an image has one name, the plot's
    body = re.sub(r'\s(?:aria-[a-z]+|role)="[^"]*"', "", body)
    body = re.sub(r'(?<!data-tip)="[^"<>]*"', _rounded, body)
    body = re.sub(r'(?<= d=")M[^"<>a-zB-KN-Y]+(?=Z?")', _with_straight_lines, body)
    body = _STYLED.sub("", body)
    body = _INVISIBLE.sub("", body)
    body = re.sub(rf"{_MARK}(\d+)", lambda found: escape(names[int(found[1])], quote=False), body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-title {name}-description"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        f' style="min-width: {0.8 * width:.0f}px; max-width: {1.3 * width:.0f}px">'
        f'<title id="{name}-title">{escape(title, quote=False)}</title>'
        f'<desc id="{name}-description">{escape(description, quote=False)}</desc>{body}'
    )


_STYLED = re.compile(
    r'\s(?:font-family|pointer-events|class)="[^"]*"|\s(?:font-weight="normal"|opacity="1"|stroke-width="1"|font-size="12px")'
    rf'|(?<=") fill="{re.escape(INK)}"(?=(?: opacity="1")?>)'
)
"""Attributes that page.css sets or that have no effect: a third of the file."""

_INVISIBLE = re.compile(r'<path d="[^"<>]*"(?: display="none")?/>')
"""Paths that are neither filled nor stroked."""


def _with_straight_lines(path: re.Match[str]) -> str:
    """Shorten a path of straight lines: H or V along an axis, one for several in a row."""
    points = [tuple(point.split(",")) for point in path[0][1:].split("L")]
    if any(len(point) != 2 for point in points):
        return path[0]
    kept: list[str] = [f"M{points[0][0]},{points[0][1]}"]
    for (x0, y0), (x, y) in pairwise(points):
        step = f"H{x}" if y == y0 else f"V{y}" if x == x0 else f"L{x},{y}"
        if step[0] == kept[-1][0] != "L" and step[0] != "M":
            kept.pop()
        kept.append(step)
    return "".join(kept)


def _rounded(attribute: re.Match[str]) -> str:
    """Round to tenths of a pixel: finer digits would be half of the file."""
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute[0])

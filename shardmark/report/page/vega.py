"""Vega-Lite draws: a specification in, an SVG out that follows the page's colours.

Of what was tried, `vl-convert-python` is Vega-Lite itself with an engine to run it, so that the page needs no script to
show a plot and loads none. It draws a plot in a tenth of a second and leaves room for names of any length. matplotlib,
which this suite draws its documents with, took five times as long, more than a page of 2,000 rows may take for its
plots, and has room for names only where it lays each one out twice. Plotly and ECharts draw in the reader's browser:
either is more than a megabyte before the first figure, and without JavaScript there is nothing. uPlot is small, and
draws on a canvas, which neither a theme's colours nor a screen reader reaches.
"""

from __future__ import annotations

import re
from typing import Any

Spec = dict[str, Any]

SERIES = [f"var(--series-{i})" for i in range(8)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
"""With the colours: no two of a plot's lines are told apart by colour alone."""

INK, FAINT, BACKGROUND = "var(--ink)", "var(--rule)", "var(--surface)"

_CONFIG: Spec = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "range": {"category": SERIES, "symbol": SHAPES},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": FAINT,
        "domainColor": FAINT,
        "tickColor": FAINT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 340,
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
        "labelLimit": 220,
        "symbolStrokeColor": INK,
    },
    "text": {"color": INK, "fontSize": 11},
    "point": {"opacity": 1},
    "tick": {"opacity": 1},
    "rule": {"color": INK},
}


def draw(spec: Spec, name: str, title: str, description: str) -> str:
    """The SVG of a Vega-Lite specification. Its ids begin with `name`, which no other plot of the page has."""
    from vl_convert import vegalite_to_svg  # an engine of its own, that only a page needs

    drawn = vegalite_to_svg({"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": _CONFIG, **spec})
    opening, _, body = drawn.partition(">")
    width, height = (float(found) for found in re.findall(r'(?:width|height)="([\d.]+)"', opening)[:2])
    body = re.sub(r'\s(?:aria-[a-z]+|role)="[^"]*"', "", body)  # an image has one name: the plot's
    body = re.sub(r'="[^"<>]*"', _rounded, body)
    body = re.sub(r'\s(?:font-family|pointer-events|class)="[^"]*"|\s(?:font-weight="normal"|opacity="1")', "", body)
    body = re.sub(r'<path d=""[^>]*/>|<path d="M0,0h0v0h0Z"[^>]*/>', "", body)
    body = re.sub(r"(L[\d.,-]+)(?:\1)+", r"\1", body)  # a step of no height
    body = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-title {name}-description"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f'<title id="{name}-title">{_escaped(title)}</title>'
        f'<desc id="{name}-description">{_escaped(description)}</desc>{body}'
    )


def _rounded(attribute: re.Match[str]) -> str:
    """Tenths of a pixel are enough; thousandths are half of the file."""
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute[0])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

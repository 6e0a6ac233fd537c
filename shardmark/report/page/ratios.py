"""Then and now: the ratio to the peer of the same run, with its interval, of every test whose time has changed."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.report.changes import Changes
from shardmark.report.page.figure import Cell, Figure, first
from shardmark.report.page.vega import INK, SERIES, Spec, room, stand_ins
from shardmark.rows.columns import Entry


def ratios(changes: Changes) -> Figure | None:
    """The figure; None where no time has changed."""
    if not changes.ratios:
        return None
    notes = ["Each step's time over its peer's in the same run, as seconds depend on what else the machine does."]
    entries = [
        {"test": test.partition("::")[2] or test, "run": run, "ratio": each.center, "low": each.low, "high": each.high}
        for test, both in changes.ratios.items()
        for run, each in zip((changes.name, "this run"), both, strict=True)
    ]
    shown = list(first(entries, notes))
    tests = list(dict.fromkeys(str(each["test"]) for each in shown))
    rows: list[list[Cell]] = [[*map(str, (each["test"], each["run"])), *_numbers(each)] for each in entries]
    columns = ["test", "run", "ratio to peer", "interval from", "to"]
    return Figure(
        f"Ratio to the peer, in {changes.name} and now", _spec(shown, changes.name, tests), columns, rows, notes, tests
    )


def _numbers(each: Entry) -> list[float]:
    return [float(f"{each[key]:.4g}") for key in ("ratio", "low", "high")]


def _spec(data: list[Entry], name: str, tests: Sequence[str]) -> Spec:
    shorts = stand_ins(tests)
    data = [each | {"test": shorts[each["test"]]} for each in data]
    encoding = {
        "y": {"field": "test", "type": "nominal", "sort": None, "axis": {"title": None, "minExtent": room(tests)}},
        "yOffset": {"field": "run", "sort": [name, "this run"]},
        "color": {
            "field": "run",
            "type": "nominal",
            "scale": {"domain": [name, "this run"], "range": [INK, SERIES[0]]},
            "legend": {"title": None},
        },
    }
    x = {"type": "quantitative", "scale": {"zero": False}}
    return {
        "data": {"values": data},
        "width": 420,
        "height": {"step": 14, "for": "offset"},
        "encoding": encoding,
        "layer": [
            {"mark": {"type": "rule"}, "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {"x": {**x, "field": "ratio", "axis": {"title": "ratio to peer"}}},
            },
        ],
    }

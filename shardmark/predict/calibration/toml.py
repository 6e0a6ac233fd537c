"""Write hardware as a TOML file that `--hardware` and `--simulate` take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from shardmark.meter.hardware import Hardware

PER_LINE = 110
"""Characters of a line of sizes, at most."""


def toml(on: Hardware, comments: Iterable[str] = ()) -> str:
    """The file's text, which `shardmark.meter.hardware.hardware` reads; each comment is a line on top."""
    return "\n".join([*(f"# {line}" for line in comments), *_lines(asdict(on))]) + "\n"


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    del figures["name"]
    reached, measured = figures.pop("reached"), figures.pop("measured")
    for key, value in figures.items():
        if value is not None:
            yield f"{key} = {_value(value)}"
    yield "\n[reached]"
    yield from (f"{key} = {_value(value)}" for key, value in reached.items())
    for dtype, table in measured.items():
        yield f"\n[measured.{dtype}]"
        for operator, rows in table.items():
            yield f"{operator} = [{_wrapped([_value(row) for row in rows])}]"


def _value(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case float():
            return f"{value:.4g}" if value == value else "nan"
    return json.dumps(value)


def _wrapped(items: list[str]) -> str:
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > PER_LINE:
            lines.append("")
        lines[-1] += f"{item}, "
    return lines[0].rstrip() if len(lines) == 1 else "\n  " + "\n  ".join(line.rstrip() for line in lines) + "\n"

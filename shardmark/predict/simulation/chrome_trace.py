"""The Chrome trace of a predicted step, for chrome://tracing and Perfetto: a row for each stream, one for the parts.

The format is Google's "Trace Event Format": complete events ("X"), in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardmark.predict.simulation.schedule import Span, Step

_MICRO = 1e6


def write_trace(step: Step, path: Path) -> Path:
    """Write the step's trace there; returns the path."""
    path.write_text(json.dumps({"traceEvents": list(_events(step)), "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _events(step: Step) -> Iterator[dict[str, Any]]:
    streams = list(dict.fromkeys(["parts", "", *(span.stream for span in step.spans)]))
    for number, stream in enumerate(streams):
        name = "compute" if stream == "" else stream if not stream.isdigit() else f"stream {stream}"
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
    began = 0.0
    for part, seconds in step.parts.items():
        yield {"ph": "X", "pid": 0, "tid": 0, "name": part, "ts": began * _MICRO, "dur": seconds * _MICRO}
        began += seconds
    for span in step.spans:
        yield {
            "ph": "X",
            "pid": 0,
            "tid": streams.index(span.stream),
            "name": span.name,
            "ts": span.begin * _MICRO,
            "dur": (span.end - span.begin) * _MICRO,
            "args": _args(span),
        }


def _args(span: Span) -> dict[str, Any]:
    if span.cost is None:
        return {"bytes": span.nbytes, "at least us": span.least * _MICRO}
    shapes = [f"{each.batch} x ({each.m}, {each.k}) ({each.k}, {each.n})" for each in span.cost.products]
    return {"FLOP": span.cost.flops, "bytes": span.cost.nbytes, "at least us": span.least * _MICRO, "products": shapes}

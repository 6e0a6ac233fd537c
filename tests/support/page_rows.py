"""A run as JSON, planted: rows that have what each plot of the page draws, and a row whose names are hostile."""

from typing import Any

from shardmark.report.plots import Lines, Points, Published, saved
from shardmark.rows.row import SCHEMA

HOSTILE = "</title><script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>\"'{{7*7}}\u202e\ud800\n${x}"

TITLES = (
    "Time by length",
    "Exposed communication",
    "Time beside the peer's",
    "Peak memory",
    "Where the step's time goes",
    "Kernels that the time goes to",
    "The predicted step, stream by stream",
    "Memory by kind through the step",
    "Memory allocated after each stage",
    "Memory reserved after each stage",
)
"""Titles of the page's plots; the planted run has rows for every kind. `PUBLISHED` is on a page of its own."""

LENGTHS = Lines("Time by length", "case.seq", "stats.median", "s", "length", "time", limit="limit.seconds")
BUCKETS = Lines(
    "Exposed communication",
    "case.bucket_mb",
    "time.parts.communication",
    "s",
    curve="time.model.exposed",
    best=("time.model.best_bytes", "time.model.best_seconds"),
    x_scale=1e-6,
)
PUBLISHED = Points(
    "Ours and published",
    {"step time": "stats.median"},
    {"step time": "s"},
    (Published("a paper", "8 GPUs of another kind", "theirs", "step time", 0.5),),
)
"""Plots that the planted run's question declares."""


def entry(
    name: str, case: dict[str, Any], seconds: float = 0.01, group: str = "A question?", **row: Any
) -> dict[str, Any]:
    """An entry of pytest-benchmark with a row as the instruments write it."""
    time = {"parts": {}, "peer": None, "ratio": None, "interval": None, "goal": None, "judged_interval": None}
    tensors = {"tensors": 2**20, "workspace": 2**18, "workspace_operator": "mm", "formula": 2**20, "budget": 2**21}
    own = {
        "schema": SCHEMA,
        "family": "planted",
        "implementation": name,
        "case": {"dtype": "float32", **case},
        "device": "cpu",
        "world_size": 1,
        "link": None,
        "scale": "smoke",
        "memory": {**tensors, "peak": 2**20 + 2**18, **row.pop("memory", {})},
        "time": {**time, **row.pop("time", {})},
        "work": {},
        "limit": {"seconds": seconds / 3},
        "counters": {},
        "verdict": "pass",
        "why": None,
    }
    test = f"test_planted[{name}-{case['id']}]"
    stats = {"median": seconds, "q1": 0.9 * seconds, "q3": 1.1 * seconds, "rounds": 5, "data": [seconds] * 5}
    return {
        "group": group,
        "name": test,
        "fullname": f"perf/test_planted.py::{test}",
        "stats": stats,
        "params": None,
        "cells": {},
        "extra_info": own | row,
    }


def output(benchmarks: list[dict[str, Any]]) -> dict[str, Any]:
    """A run's file with these entries, before it is written as JSON."""
    machine = {"device": "cpu", "gpus": [], "cores": 2, "threads": 2, "torch": "2.13.0", "cpu": {"brand_raw": "a CPU"}}
    said = {"columns": ["case", "implementation", "time ms"], "short": "a", "answer": "42", "lines": ["a line", "two"]}
    plots = [saved(plot) for plot in (LENGTHS, BUCKETS, PUBLISHED)]
    return {
        "machine_info": {**machine, "device_bytes": 4 * 2**20},
        "commit_info": {"id": "0" * 40},
        "datetime": "2026-01-01T00:00:00",
        "questions": [{"text": "A question?", **said, "plots": plots}],
        "unmeasured": [],
        "benchmarks": benchmarks,
    }


def run() -> dict[str, Any]:
    """A run with rows for all plots."""
    rows = [
        entry(name, {"id": f"s{seq}", "seq": seq}, seconds=seq * 1e-5 * factor, limit={"seconds": seq * 3e-6})
        for name, factor in (("eager", 1), ("flash", 2))
        for seq in (128, 256, 512)
    ]
    rows += [
        entry("bucketed", {"id": f"bucket{size}", "bucket_mb": size}, time={"parts": _parts(0.001 * size)})
        for size in (1, 25)
    ]
    model = {"exposed": {"1": 0.003, "25": 0.004}, "best_bytes": 5e6, "best_seconds": 0.002}
    rows.append(entry("backend", {"id": "model"}, time={"model": model}))
    curve = [{"parameters": 2**20, "activations": place * 2**14} for place in range(150)]
    rows.append(entry("observed", {"id": "curve"}, memory={"curve": curve}))
    stages = {name: {"live": 2**20, "reserved": 2**21, "peak": 2**20, "formula": 2**20} for name in ("model", "step")}
    rows.append(entry("staged", {"id": "stages"}, memory={"stages": stages}))
    phases = {"forward": {"categories": {"matrix product": 0.01, "softmax": 0.002}}}
    rows.append(entry("profiled", {"id": "kernels"}, kernels={"phases": phases}))
    rows.append(predicted("predicted", 0.02))
    rows += [entry("eager", {"id": "raced"}), raced("quick", 0.5), raced("slow", 1.9, tensors=2**21 - 2**17)]
    rows.append(entry("failed", {"id": "large"}, verdict="fail", why="peak 3 MiB\nof 2 MiB <b>at most</b>"))
    rows.append(entry(HOSTILE, {"id": HOSTILE}, group=HOSTILE))
    return output(rows)


def predicted(name: str, seconds: float, reserved: int = 2**20, simulated: bool = False) -> dict[str, Any]:
    """A row of a simulation, of a device with room for 2 MiB."""
    busy = {"compute": [[0.0, seconds / 2], [seconds * 3 / 4, seconds]], "collectives 0": [[0.0, seconds]]}
    time = {
        "peer": "another",
        "ratio": 0.5,
        "parts": {"forward": seconds / 2, "backward": seconds / 2},
        "predicted": {
            "interval": [0.8 * seconds, 1.5 * seconds],
            "sources": 2,
            "at_least": seconds / 3,
            "streams": busy,
        },
    }
    memory = {"reserved": reserved, "available": 2**21}
    return entry(name, {"id": "predicted"}, seconds, time=time, memory=memory, simulated=simulated, hardware="a GPU")


def raced(test: str, ratio: float, tensors: int = 2**20) -> dict[str, Any]:
    """A row with a race whose interval is narrow."""
    ends = [0.99 * ratio, 1.01 * ratio]
    time = {"peer": "eager", "ratio": ratio, "interval": ends, "judged_interval": ends, "judged_confidence": 0.999}
    mean, processes = (
        {"mean": ratio, "mean_error": 0.001},
        {"processes": [ratio] * 3, "means": [ratio] * 3, "count": 300},
    )
    time["pairs"] = {"peer": {"ratio": ratio, "interval": ends, "confidence": 0.999, **mean, **processes}}
    return entry(test, {"id": "raced"}, 0.01 * ratio, time=time, memory={"tensors": tensors})


def _parts(communication: float) -> dict[str, float]:
    return {"forward": 0.002, "backward": 0.004, "communication": communication, "optimizer": 0.001}

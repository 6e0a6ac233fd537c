"""Make hardware of a saved run, as far as its rows tell: the roofline's rates, the backend's collectives, launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from shardmark.meter.hardware import CPU, Hardware, Reached, known_hardware
from shardmark.predict.calibration.figures import Timings, hardware_of, with_launches
from shardmark.predict.calibration.measuring import Calibration
from shardmark.rows.reader import RunFileError, read_run

BACKEND = "backend"
"""The implementation of collectives that is PyTorch's own."""
ENOUGH_LAUNCHES = 20
"""Operators of a step that shows the host's seconds for one of them."""
SAME_MEMORY = 0.02
"""Share by which the memory of a known device may differ from what the run's device reports."""


def calibration_of_run(path: Path) -> Calibration:
    """The hardware that the run was on. RunFileError, in one line, for a file that tells nothing of it."""
    run = read_run(path)
    rows = [(entry["extra_info"], entry["stats"]) for entry in run["benchmarks"] if entry.get("stats")]
    rows = [(row, stats) for row, stats in rows if not row["simulated"]]
    known = _device(run["machine_info"], path, max((row["world_size"] for row, _ in rows), default=1))
    found, untold = Timings(bandwidth=0.0), ["operators of a step, one by one"]
    for row, _ in rows:
        limit = row.get("limit") or {}
        if rate := limit.get("flops_per_second"):
            found.flops[row["dtype"]] = max(rate, found.flops.get(row["dtype"], 0.0))
            found.bandwidth = max(limit["bytes_per_second"], found.bandwidth)
    found.collectives = list(_collectives(rows))
    if not found.bandwidth:
        raise RunFileError(f"{path} has no row with a roofline, which the rates of products and memory come from")
    if "float32" not in found.flops:
        found.flops["float32"] = found.flops.get("bfloat16", max(found.flops.values())) / 16
        untold.append("products in float32, taken as a sixteenth")
    if not found.collectives:
        untold.append("collectives")
    on = hardware_of(known, known.flops if known.device == "cuda" else {}, found)
    if launches := list(_launches(rows)):
        on = with_launches(on, median(launches), median(launches))
    else:
        untold.append(f"launches, taken as {Reached().launch * 1e6:.0f} us")
    return Calibration(on, len(rows), left_out=[f"(the run does not tell) {each}" for each in untold])


def _device(machine: dict[str, Any], path: Path, most: int) -> Hardware:
    """The device of the run: this suite's table of it, with the memory that the run reports. `most` ranks shared a
    CPU."""
    nbytes = machine["device_bytes"]
    if machine["device"] == "cpu":
        return replace(CPU, memory_bytes=nbytes, devices_per_node=most)
    name = (machine.get("gpus") or ["?"])[0]
    alike = [
        each
        for each in known_hardware().values()
        if each.device == "cuda"
        and each.name.partition("-")[0] in name.lower()
        and math.isclose(each.memory_bytes, nbytes, rel_tol=SAME_MEMORY)
    ]
    if not alike:
        raise RunFileError(f"{path} is of {name}, of which no table is known; describe it in a TOML file of your own")
    return replace(min(alike, key=lambda each: abs(each.memory_bytes - nbytes)), memory_bytes=nbytes)


def _collectives(rows: list[tuple[Any, Any]]) -> Iterator[tuple[str, int, int, float]]:
    for row, stats in rows:
        of_backend = row["family"] == "collectives" and row["implementation"] == BACKEND and not row.get("link")
        if of_backend and (sent := row["work"].get("bytes_communicated")) and row["world_size"] > 1:
            yield row["case"]["collective"], row["world_size"], sent, stats["median"]


def _launches(rows: list[tuple[Any, Any]]) -> Iterator[float]:
    """The host's seconds for an operator, in each row where it was timed."""
    for row, _ in rows:
        operators = (row.get("counters") or {}).get("operators") or 0
        host = row["time"].get("host")
        if host and operators >= ENOUGH_LAUNCHES:
            yield host / operators

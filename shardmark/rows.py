"""Rows: what one measured case says, and the file that holds every row as soon as it is measured.

A row is the `extra_info` of a pytest-benchmark entry. Cases that have no times (not started, out of memory) are entries
of the same form under the JSON's own key "unmeasured", as pytest-benchmark's tools expect times in "benchmarks".
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch

from shardmark.budget import SHOWN_CONFIDENCE, Interval, MemoryBudget, median_interval, paired_ratios, tolerated
from shardmark.clock import Laps
from shardmark.grid import Work
from shardmark.hardware import Roofline
from shardmark.kernels import StepProfile
from shardmark.plan import COMMUNICATION, COMPUTE, IMPLEMENTATION, PEER, Measured, Plan
from shardmark.registry import Race
from shardmark.timeline import Timeline, by_layer_and_operator

Row = dict[str, Any]


def new_row(plan: Plan, scale: str, link: str | None) -> Row:
    """The part of a row that is known before anything is measured; `link` is the rate of the one between the ranks."""
    case = asdict(plan.case) if is_dataclass(plan.case) and not isinstance(plan.case, type) else {}
    return {
        "family": plan.implementation.family,
        "implementation": plan.implementation.name,
        "case": {"id": str(plan.case), **case},
        "device": plan.device,
        "backend": None,
        "world_size": plan.world_size,
        "link": link,
        "dtype": case.get("dtype"),
        "scale": scale,
        "simulated": False,
        "memory": {},
        "time": {},
        "work": {},
        "limit": {},
        "verdict": None,
    }


def step_seconds(ranks: list[Measured], name: str = IMPLEMENTATION) -> list[float]:
    """Each round's time: the slowest rank's."""
    return [max(laps.seconds for laps in round_) for round_ in zip(*(rank.laps[name] for rank in ranks), strict=True)]


def memory_entry(ranks: list[Measured], budget: MemoryBudget) -> Row:
    """Bytes by phase and at the peak, on the rank that held most, beside the budget of its tensors."""
    most = max((rank.memory for rank in ranks), key=lambda memory: (memory.tensors, memory.peak))
    return {
        "phases": most.phases,
        "peak": most.peak,
        "tensors": most.tensors,
        "workspace": most.workspace.nbytes,
        "workspace_operator": most.workspace.operator or None,
        "peak_by_rank": [rank.memory.peak for rank in ranks],
        "tensors_by_rank": [rank.memory.tensors for rank in ranks],
        **({"peaks": most.peaks} if most.peaks else {}),
        **asdict(budget),
        "budget": budget.bytes,
    }


def stages_entry(ranks: list[Measured], formulas: Mapping[str, int]) -> Row:
    """Bytes held after each stage, on the rank that holds most then, beside the formula of those that are live."""
    return {
        name: asdict(max((rank.memory.stages[name] for rank in ranks), key=lambda stage: stage.live))
        | {"formula": formulas.get(name)}
        for name in ranks[0].memory.stages
    }


def timeline_entry(timeline: Timeline, expected: Mapping[tuple[str, str], int]) -> Row:
    """Bytes by kind at each phase and along the step; what is kept for backward by module and operator, beside what
    the formula `expected` of each; and the largest blocks at the peak."""
    kept = by_layer_and_operator(timeline.activations)
    return {
        "kinds": timeline.phases,
        "curve": timeline.curve,
        "activations": [
            {"module": module, "operator": operator, "bytes": kept.get(where, 0), "formula": expected.get(where)}
            for where in {**kept, **expected}
            for module, operator in [where]
        ],
        "largest": [asdict(block) for block in timeline.largest],
    }


def time_entry(
    ranks: list[Measured], race: Race | None, confidence: float = SHOWN_CONFIDENCE
) -> tuple[Row, Interval | None]:
    """Times by part and by rank, and the ratio to the peer, if there is one, with the 95% interval for a goal; and
    beside the row the interval for a budget, with that confidence.
    """
    entry: Row = {
        "parts": _parts(ranks),
        "mean_by_rank": [fmean(laps.seconds for laps in rank.laps[IMPLEMENTATION]) for rank in ranks],
        "peer": None,
        "ratio": None,
        "interval": None,
        "budget": None,
        "goal": None,
        "outcome": None,
    }
    if {COMPUTE, COMMUNICATION} <= set(ranks[0].laps):
        entry |= _hidden(*(median(step_seconds(ranks, name)) for name in (IMPLEMENTATION, COMPUTE, COMMUNICATION)))
    first_steps = [rank.first_step for rank in ranks if rank.first_step is not None]
    if first_steps:
        entry["first_step"] = max(first_steps)
        entry["compile"] = max(first_steps) - median(step_seconds(ranks))
    if race is None or PEER not in ranks[0].laps:  # no peer, or no room or device for it
        return entry, None
    peer_seconds = step_seconds(ranks, PEER)
    ratios = paired_ratios(step_seconds(ranks), peer_seconds)
    interval, judged = median_interval(ratios), median_interval(ratios, confidence)
    entry |= {
        "peer": race.peer,
        "peer_mean": fmean(peer_seconds),
        "ratio": interval.median,
        "interval": [interval.low, interval.high],
        "coverage": interval.coverage,
        "budget": race.budget,
        "budget_interval": None if race.budget is None else [judged.low, judged.high],
        "budget_coverage": None if race.budget is None else judged.coverage,
        "goal": race.goal,
        "outcome": None if race.goal is None else interval.outcome(tolerated(race.goal)),
    }
    return entry, judged


def profile_entry(ranks: list[Measured], profiled: Callable[[StepProfile], Row] | None) -> Row:
    """Where time went on the first rank, as `profiled` tells it, and the names of all ranks' files of `--trace-dir`."""
    entry: Row = {}
    if profiled is not None and ranks[0].profile is not None:
        entry["kernels"] = profiled(ranks[0].profile)
    if files := [file.name for rank in ranks for file in rank.files]:
        entry["trace"] = files
    return entry


def limit_entry(work: Work, roofline: Roofline, devices: int, seconds: float) -> Row:
    """The roofline's time for this work on `devices` of them, the fraction of it that was reached, and MFU."""
    limit = roofline.seconds(work) / devices
    entry = {"seconds": limit, "fraction": limit / seconds if seconds else None, **asdict(roofline)}
    if work.model_flops and seconds:
        entry["mfu"] = work.model_flops / (seconds * devices * roofline.peak_flops_per_second)
    return entry


def limit_goals(limit: Row, goals: Mapping[str, float], seconds: list[float]) -> Row:
    """Goals of the limit's figures, "fraction" or "mfu", at least so much of each, and whether they are reached.

    A figure is so many FLOPs or bytes over the step time, so the 95% interval of the step time decides.
    """
    step = median_interval(seconds)
    longest = {name: tolerated(limit[name] * fmean(seconds) / goal) for name, goal in goals.items()}
    return {name: {"goal": goal, "outcome": step.outcome(longest[name])} for name, goal in goals.items()}


def _parts(ranks: list[Measured]) -> dict[str, float]:
    """Mean seconds of each part over rounds and ranks.

    With compute alone in the same rounds, its parts, "forward" and "backward", are compute's, and "communication" what
    the ranks spent in them and in it beyond that: the communication that computation did not hide.
    """
    parts = _mean_parts([laps for rank in ranks for laps in rank.laps[IMPLEMENTATION]])
    if COMPUTE in ranks[0].laps:
        compute = _mean_parts([laps for rank in ranks for laps in rank.laps[COMPUTE]])
        together = sum(parts[part] for part in {*compute, "communication"})
        parts |= compute | {"communication": together - sum(compute.values())}
    return parts


def _hidden(step: float, compute: float, communication: float) -> Row:
    """The share of communication that the step hid: all of it where the step takes no longer than compute alone."""
    return {
        "compute_alone": compute,
        "communication_alone": communication,
        "hidden": 1 - (step - compute) / communication,
    }


def _mean_parts(laps: list[Laps]) -> dict[str, float]:
    return {part: fmean(lap.parts[part] for lap in laps) for part in laps[0].parts}


class RowFile:
    """The file of `--benchmark-json`, written whole after every row, so that whatever ends the run loses none."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.path: Path | None = config.getoption("benchmark_json", None)
        self.rows: list[Row] = []
        """Every row of this run, as its test made it: an entry with name, group, stats and extra_info."""

    def add(self, entry: Row) -> None:
        """Take a row and save all of them. Those with `stats` are in pytest-benchmark's own list already."""
        self.rows.append(entry)
        if self.path is not None:
            self._save(self.path)

    @property
    def unmeasured(self) -> list[Row]:
        """The rows without times."""
        return [entry for entry in self.rows if entry["stats"] is None]

    def _save(self, path: Path) -> None:
        hook, benchmarks = self.config.hook, self._session.benchmarks
        output = hook.pytest_benchmark_generate_json(
            config=self.config,
            benchmarks=benchmarks,
            include_data=True,
            machine_info=self._machine_info,
            commit_info=self._commit_info,
        )
        hook.pytest_benchmark_update_json(config=self.config, benchmarks=benchmarks, output_json=output)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(output, indent=4))
        os.replace(partial, path)  # a reader finds the old file or the new one, never half of one

    @property
    def _session(self) -> Any:
        """pytest-benchmark's own session, which holds what it has timed."""
        return self.config.pluginmanager.get_plugin("pytest-benchmark")

    @cached_property
    def _machine_info(self) -> Row:
        return self._session.get_machine_info()

    @cached_property
    def _commit_info(self) -> Row:
        return self.config.hook.pytest_benchmark_generate_commit_info(config=self.config)


def describe_machine(device: str) -> Row:
    """What `machine_info` says beside pytest-benchmark's own: GPUs and driver, torch and triton."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    return {
        "device": device,
        "gpus": gpus,
        "driver": _driver_version() if gpus else None,
        "torch": torch.__version__,
        "triton": triton_version,
        "libc": " ".join(platform.libc_ver()),
    }


def _driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None

"""Run the gate, as people do, on a step that is slower by a known share."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardmark.rows.pairs import read
from shardmark.verdict.slowdown import slowdown
from studies.verdicts.model import make_model
from studies.verdicts.neighbours import neighbours
from studies.verdicts.project import NAME, Step, change, make

STEPS_MS = (10, 40, 100)
"""Lengths of a step, of one rank."""
STALL = "stalls of 10%"
SLOWER: tuple[int | str, ...] = (0, 5, 10, STALL)
"""Percent by which a step is slower; or each twentieth step takes three times as long."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """One run: the length of the step in ms, the slowdown, the ranks, the neighbour and how the ranks are scheduled."""

    step: int
    slower: int | str
    ranks: int
    neighbour: str
    real_time: bool = False


def passes_in(milliseconds: float) -> int:
    """The number of passes that take about so long on this machine; 20 at least."""
    model, inputs = make_model()
    torch.set_num_threads(1)
    for _ in range(20):
        model(inputs).square().mean().backward()
    began = time.perf_counter()
    for _ in range(100):
        model(inputs).square().mean().backward()
    return max(20, round(milliseconds / 1e3 / ((time.perf_counter() - began) / 100)))


def changed(before: Step, slower: int | str) -> Step:
    """The step after the change."""
    if isinstance(slower, str):
        return replace(before, stall_every=20)
    return replace(before, repeated=round(before.repeated * (1 + slower / 100)))


def pytest_run(folder: Path, *options: str) -> tuple[int, str, float]:
    """Run the suite's command in the folder: (exit status, output, seconds)."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device=cpu", *options]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outer, "PYTHONPATH": str(ROOT), "PYTEST_PLUGINS": "shardmark.plugin"}
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr, time.perf_counter() - began


def judge(setting: Setting) -> dict[str, Any]:
    """One run of `pytest --against-ref before`: the setting, the verdict on time, seconds of the command, pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder, passes = Path(name), passes_in(setting.step)
        before = Step(repeated=passes, peer=passes)
        make(folder, before)
        change(folder, changed(before, setting.slower))
        options = [f"--against-ref={NAME}", "-k", f"mine and {setting.ranks}ranks", "--benchmark-json=out.json"]
        with neighbours(setting.neighbour, secrets.randbits(32)):
            _, _, seconds = pytest_run(folder, *options, *(["--real-time"] if setting.real_time else []))
        row = json.loads((folder / "out.json").read_text())["benchmarks"][0]["extra_info"]
    pairs = row["ref"]["pairs"]
    # The row fails by its counters too: a step that is slower has more operators.
    return {**vars(setting), "verdict": slowdown(read(pairs)).verdict(), "seconds": seconds, **pairs}


def run(file: Path, minutes: float, real_time: bool) -> None:
    """Add runs of random settings to the file until the minutes are over; half of them beside no neighbour, of those in
    real time none."""
    until, generator = time.monotonic() + 60 * minutes, random.Random(secrets.randbits(64))
    version = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    file.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < until:
        neighbour = generator.choice(["busy", "drift", "spikes", *([] if real_time else 3 * ["none"])])
        setting = Setting(
            generator.choice(STEPS_MS), generator.choice(SLOWER), generator.choice([1, 1, 2]), neighbour, real_time
        )
        line = {"commit": commit, **judge(setting)}
        with file.open("a") as lines:
            lines.write(f"{json.dumps(line)}\n")
        print(line, flush=True)

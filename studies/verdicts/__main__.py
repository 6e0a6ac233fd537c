"""See `studies.verdicts`."""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shardmark.api.registry import Race
from shardmark.meter.disturbances import in_words
from shardmark.meter.plan import IMPLEMENTATION, Plan, Rounds
from shardmark.ranks.world import Worlds
from shardmark.rows.fill import step_seconds, time_entry
from shardmark.rows.machine import chosen_policy
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED
from shardmark.verdict.budget import Limits, confidence, tolerated
from studies.verdicts import summary
from studies.verdicts.neighbours import NEIGHBOURS, neighbours
from studies.verdicts.steps import PEER, REPETITIONS, SLOWER, Repeated, Steps, judged_rounds, times_in_a_row

WIDTHS = {1: (96, 224), 2: (128, 256)}
"""Widths of the layer by ranks. Their steps take some milliseconds, and some tens of them, as at laptop scale."""
FOLDER = Path("docs/verdicts")


def main() -> None:
    """Add judgements or recordings until the minutes are over, or write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.verdicts", description=__import__("studies.verdicts").__doc__
    )
    parser.add_argument("what", choices=["record", "live", "smoke", "report"])
    parser.add_argument("--minutes", type=float, default=10.0)
    chosen = parser.parse_args()
    if chosen.what == "report":
        summary.write(FOLDER)
        return
    if chosen_policy() not in summary.SCHEDULING:
        parser.error(f"the study has no place for {chosen_policy()}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    worlds, until = Worlds("cpu"), time.monotonic() + 60 * chosen.minutes
    try:
        match chosen.what:
            case "record":
                record(worlds, 60 * chosen.minutes)
            case "live":
                judge_live(worlds, until)
            case "smoke":
                run_smoke(until)
    finally:
        worlds.close()


def plan_of(ranks: int, case: Steps) -> Plan:
    """A plan as `measure` makes it in a run of `JUDGEMENTS` verdicts; the budget is the peer's time."""
    limits = Limits(confidence(summary.JUDGEMENTS), (1.0,))
    return Plan(Repeated, SLOWER, PEER, case, "cpu", ranks, Rounds(warmups=2), limits=limits, coin=secrets.randbits(64))


def settings() -> Iterator[tuple[str, int, int]]:
    """All combinations of neighbour, ranks and width."""
    return ((name, ranks, width) for name, ranks in product(NEIGHBOURS, WIDTHS) for width in WIDTHS[ranks])


def judge_live(worlds: Worlds, until: float) -> None:
    """Judge steps of random settings, equal ones as often as slower ones; each judgement is a line of the file."""
    generator = random.Random(secrets.randbits(64))
    while time.monotonic() < until:
        name, ranks, width = generator.choice(list(settings()))
        slower = generator.choice([0, 0, 0, *[each for each in REPETITIONS if each]])
        plan = plan_of(ranks, Steps(slower, width))
        with neighbours(name, generator.getrandbits(32)):
            began = time.perf_counter()
            measured = worlds.get(ranks).run(judged_rounds, plan)
            seconds = time.perf_counter() - began
        assert plan.limits is not None
        entry, ratio = time_entry(measured, Race("peer", budget=1.0), plan.limits.confidence)
        assert ratio is not None
        line = {
            "neighbour": name,
            "ranks": ranks,
            "scheduling": chosen_policy(),
            "width": width,
            "slower": slower,
            "verdict": ratio.verdict(tolerated(1.0)),
            "ratio": ratio.center,
            "interval": ratio.ends,
            "rounds": len(measured[0].laps[IMPLEMENTATION]),
            "step": sorted(step_seconds(measured))[len(measured[0].laps[IMPLEMENTATION]) // 2],
            "seconds": seconds,
            "machine": in_words(entry["machine"]),
            "load": os.getloadavg()[0],
        }
        add("judgements", line)


def record(worlds: Worlds, seconds: float) -> None:
    """Record equal steps in a row; each setting gets the same share of the time."""
    each = seconds / len(list(settings()))
    for name, ranks, width in settings():
        with neighbours(name, secrets.randbits(32)):
            (taken, *_) = worlds.get(ranks).run(times_in_a_row, plan_of(ranks, Steps(0, width)), each)
        setting = {"neighbour": name, "ranks": ranks, "scheduling": chosen_policy(), "width": width}
        add("recordings", {**setting, "load": os.getloadavg()[0], "seconds": [round(s, 6) for s in taken]})


def run_smoke(until: float) -> None:
    """Whole runs of the suite at smoke scale; each is a line of the file."""
    while time.monotonic() < until:
        name = random.choice(list(NEIGHBOURS))
        with tempfile.TemporaryDirectory() as folder, neighbours(name, secrets.randbits(32)):
            out = Path(folder) / "out.json"
            began = time.perf_counter()
            options = ["-m", "pytest", "perf", "--scale=smoke", "--device=cpu", "-p", "no:cacheprovider"]
            ended = subprocess.run([sys.executable, *options, f"--benchmark-json={out}"], stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            rows = [entry["extra_info"] for entry in json.loads(out.read_text())["benchmarks"]]
        judged = [row["verdict"] for row in rows if row["time"].get("budget") is not None]
        verdicts = {verdict: judged.count(verdict) for verdict in (PASS, UNDECIDED, FAIL)}
        add(
            "smoke_runs",
            {
                "neighbour": name,
                "scheduling": chosen_policy(),
                "status": ended.returncode,
                "seconds": seconds,
                **verdicts,
            },
        )


def add(what: str, line: dict[str, Any]) -> None:
    """Add a line to that file."""
    text = json.dumps(line)
    print(what, text[:200], flush=True)
    with (FOLDER / f"{what}.jsonl").open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

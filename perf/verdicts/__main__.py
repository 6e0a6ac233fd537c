"""See `perf.verdicts`."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from perf.verdicts import summary
from perf.verdicts.neighbours import NEIGHBOURS, neighbours
from perf.verdicts.steps import PEER, REPETITIONS, SLOWER, Repeated, Steps, judged_rounds, times_in_a_row
from shardmark.budget import Limits, confidence, tolerated
from shardmark.disturbances import in_words
from shardmark.plan import IMPLEMENTATION, Plan, Rounds
from shardmark.registry import Race
from shardmark.rows import step_seconds, time_entry
from shardmark.world import Worlds

WIDTHS = {1: (96, 224), 2: (64, 160)}
"""Of the layers, by ranks: steps of some milliseconds, and of some tens of them, as at laptop scale."""
PAGE = Path("docs/verdicts.md")
LIVE, SERIES = Path("docs/verdicts/judgements.jsonl"), Path("docs/verdicts/series.json")


def main() -> None:
    """Add judgements or recordings until the minutes are over, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m perf.verdicts", description=__import__("perf.verdicts").__doc__)
    parser.add_argument("what", choices=["live", "record", "report"])
    parser.add_argument("--minutes", type=float, default=10.0)
    chosen = parser.parse_args()
    if chosen.what == "report":
        summary.write(LIVE, SERIES, PAGE)
        return
    LIVE.parent.mkdir(parents=True, exist_ok=True)
    worlds, until = Worlds("cpu"), time.monotonic() + 60 * chosen.minutes
    try:
        judge_live(worlds, until) if chosen.what == "live" else record(worlds, 60 * chosen.minutes)
    finally:
        worlds.close()


def plan_of(ranks: int, case: Steps) -> Plan:
    """As `measure` would plan it in a run of that many verdicts, with a budget of as long as the peer."""
    limits = Limits(confidence(summary.JUDGEMENTS), (tolerated(1.0),))
    return Plan(Repeated, SLOWER, PEER, case, "cpu", ranks, Rounds(warmups=2), limits=limits, coin=secrets.randbits(64))


def settings() -> Iterator[tuple[str, int, int]]:
    """Neighbour, ranks and width, all of them in turn."""
    return ((name, ranks, width) for name, ranks in product(NEIGHBOURS, WIDTHS) for width in WIDTHS[ranks])


def judge_live(worlds: Worlds, until: float) -> None:
    """Judge steps of each setting, equal ones as often as slower ones; each judgement is a line of the file."""
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
            "width": width,
            "slower": slower,
            "verdict": ratio.verdict(tolerated(1.0)),
            "ratio": ratio.center,
            "interval": ratio.ends,
            "rounds": len(measured[0].laps[IMPLEMENTATION]),
            "step": sorted(step_seconds(measured))[len(measured[0].laps[IMPLEMENTATION]) // 2],
            "seconds": seconds,
            "machine": in_words(entry["machine"]),
        }
        print(line, flush=True)
        with LIVE.open("a") as file:
            file.write(json.dumps(line) + "\n")


def record(worlds: Worlds, seconds: float) -> None:
    """Times of equal steps in a row, in each setting for the same share of the time."""
    series: list[dict[str, Any]] = json.loads(SERIES.read_text()) if SERIES.exists() else []
    each = seconds / len(list(settings()))
    for name, ranks, width in settings():
        with neighbours(name, secrets.randbits(32)):
            (taken, *_) = worlds.get(ranks).run(times_in_a_row, plan_of(ranks, Steps(0, width)), each)
        print(name, ranks, width, len(taken), flush=True)
        series.append({"neighbour": name, "ranks": ranks, "width": width, "seconds": [round(s, 6) for s in taken]})
        SERIES.write_text(json.dumps(series))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

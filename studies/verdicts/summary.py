"""docs/verdicts.md and its plot, from the judgements and the recordings."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

from shardmark.meter.measure_case import next_look
from shardmark.meter.plan import Rounds
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, decided, fewest_rounds, interval
from shardmark.verdict.budget import confidence, tolerated
from studies.verdicts.neighbours import NEIGHBOURS

JUDGEMENTS = 59
"""Verdicts that share a run's error: as many as the laptop scale on two ranks may have."""
EFFECTS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
"""True slowdowns with which recordings are judged."""
REPLAYS = {0.0: 400}
"""Judgements of each recording by slowdown: most of equal steps, as false alarms are rare."""
FEWER_REPLAYS = 60

SCHEDULING = ("", "SCHED_RR")
PANELS = list(product((1, 2), SCHEDULING))
"""(ranks, scheduling policy) of each table and each curve."""

Judgement = dict[str, Any]


def replayed(series: Sequence[float], slower: float, generator: random.Random) -> tuple[str, float]:
    """The verdict on steps that take a share `slower` longer than a recording's, and the seconds that it took.

    It starts at a random place of the recording. For each pair of steps a coin chooses the slower one. The statistics
    depend on the coin alone, so other throws on the same steps are another judgement.
    """
    place = generator.randrange(len(series))
    slots = [series[(place + i) % len(series)] for i in range(len(series))]
    rounds, step = Rounds(), median(series)
    first = max(fewest_rounds(confidence(JUDGEMENTS)), rounds.count(step))
    ratios: list[float] = []
    seconds = 0.0
    while True:
        while len(ratios) < min(first, len(slots) // 2):
            pair = slots[2 * len(ratios) : 2 * len(ratios) + 2]
            mine, peers = pair if generator.random() < 0.5 else pair[::-1]
            ratios.append((1 + slower) * mine / peers)
            seconds += (1 + slower) * mine + peers
        done, first = len(ratios), next_look(len(ratios), seconds, rounds)
        late = first == done or done >= len(slots) // 2
        if late or decided(ratios, tolerated(1.0), confidence(JUDGEMENTS)):
            return interval(ratios, confidence(JUDGEMENTS)).verdict(tolerated(1.0)), seconds


def write(folder: Path) -> None:
    """Write the page beside the folder, from the judgements, recordings and smoke runs in it."""
    page = folder.with_suffix(".md")
    kinds = ("judgements", "recordings", "smoke_runs")
    judgements, recordings, runs = (_lines(folder / f"{kind}.jsonl") for kind in kinds)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        again = list(chain.from_iterable(pool.map(_judged_again, enumerate(recordings))))
    steps = sum(len(each["seconds"]) for each in recordings)
    page.write_text(
        PAGE.format(
            judgements=JUDGEMENTS,
            measured=_measured(judgements, runs),
            steps=f"{steps:,}",
            recordings=len(recordings),
            loads=_loads(recordings),
            replays=f"{len(again):,}",
            again=_tables(again),
            alarms_again=_alarms(again),
            smoke=_smoke(runs),
        )
    )
    _plot(judgements, again, page.with_suffix(".svg"))


def _judged_again(numbered: tuple[int, dict[str, Any]]) -> list[Judgement]:
    """Judge a recording."""
    number, recording = numbered
    setting = {name: recording[name] for name in ("neighbour", "ranks", "scheduling")}
    return [
        {**setting, "slower": round(100 * slower), "verdict": verdict, "seconds": seconds}
        for slower in EFFECTS
        for seed in range(REPLAYS.get(slower, FEWER_REPLAYS))
        for verdict, seconds in [replayed(recording["seconds"], slower, random.Random(1000 * number + seed))]
    ]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _loads(recordings: list[dict[str, Any]]) -> str:
    """The machine's load during the recordings."""
    loads = [each["load"] for each in recordings if "load" in each]
    return f", while the machine's load was {min(loads):.0f} to {max(loads):.0f}" if loads else ""


def _measured(judgements: list[Judgement], runs: list[dict[str, Any]]) -> str:
    """The sections on live judgements and smoke runs; empty before `live` and `smoke` have run."""
    sections = [f"## Whole runs at smoke scale\n\n{_smoke(runs)}\n\n"] if runs else []
    if judgements:
        sections.append(LIVE.format(count=len(judgements), alarms=_alarms(judgements), tables=_tables(judgements)))
    return "".join(sections)


def _smoke(runs: list[dict[str, Any]]) -> str:
    """The number of whole runs, and the verdicts of their time budgets."""
    counts = {verdict: sum(run[verdict] for run in runs) for verdict in (PASS, UNDECIDED, FAIL)}
    failed = sum(run[FAIL] > 0 for run in runs)
    shown = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    return f"{len(runs)} runs, {sum(counts.values()):,} time budgets: {shown}. Runs in which one failed: {failed}."


def _tables(judgements: Sequence[Judgement]) -> str:
    """A table for each of `PANELS`: verdicts and seconds by neighbour and true slowdown."""
    parts = [(f"{_title(*key)}:", _table(of_key)) for key in PANELS if (of_key := _of(key, judgements))]
    return "\n\n".join(chain.from_iterable(parts))


def _of(panel: tuple[int, str], judgements: Sequence[Judgement]) -> list[Judgement]:
    return [each for each in judgements if (each["ranks"], each["scheduling"]) == panel]


def _title(ranks: int, scheduling: str) -> str:
    return " ".join(["One rank" if ranks == 1 else f"{ranks} ranks", *(["in real time"] if scheduling else [])])


def _table(judgements: Iterable[Judgement]) -> str:
    groups: dict[tuple[str, int], list[Judgement]] = defaultdict(list)
    for each in judgements:
        groups[each["neighbour"], each["slower"]].append(each)
        groups["all", each["slower"]].append(each)
    order = {name: place for place, name in enumerate((*NEIGHBOURS, "all"))}
    lines = [
        "| neighbour | slower by | judged | fail | undecided | pass | median s | most s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, slower), found in sorted(groups.items(), key=lambda item: (item[0][1], order[item[0][0]])):
        verdicts, seconds = [each["verdict"] for each in found], [each["seconds"] for each in found]
        shares = (f"{100 * verdicts.count(verdict) / len(found):.1f}%" for verdict in (FAIL, UNDECIDED, PASS))
        cells = (name, f"{slower}%", str(len(found)), *shares, f"{median(seconds):.0f}", f"{max(seconds):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _alarms(judgements: Iterable[Judgement]) -> str:
    """False alarms among judgements of equal steps; if there are none, the highest likely rate (95%)."""
    equal = [each for each in judgements if each["slower"] == 0]
    failed = sum(each["verdict"] == FAIL for each in equal)
    bound = f"; with 95% confidence, less than 1 in {len(equal) / 3:,.0f}" if equal and failed == 0 else ""
    return f"{failed} of {len(equal):,} judgements of equal steps failed{bound}."


def _plot(live: list[Judgement], again: list[Judgement], file: Path) -> None:
    """Plot the power curve: the share of judgements that found a slowdown, by true slowdown."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "verdicts"  # the same bytes from the same figures
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 8), sharex=True, sharey=True, layout="constrained")
    for axes, panel in zip(grid.T.flat, PANELS, strict=True):
        for name in NEIGHBOURS:
            of_name = [each for each in _of(panel, again) if each["neighbour"] == name]
            axes.plot(*_shares(of_name), marker="o", label=name)
        axes.scatter(*_shares(_of(panel, live)), marker="s", color="black", label="live, all", zorder=3)
        axes.set(title=_title(*panel))
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set(ylabel="judged as slower, %")
    for axes in grid[1]:
        axes.set(xlabel="true slowdown, %")
    grid[0, 0].legend(title="neighbour")
    figure.suptitle("What a time verdict finds within 50 s")
    figure.savefig(file, metadata={"Date": None})


def _shares(judgements: Sequence[Judgement]) -> tuple[list[int], list[float]]:
    """True slowdowns in percent, and the percentage judged as slower at each."""
    slowdowns = sorted({each["slower"] for each in judgements})
    found = [[each["verdict"] == FAIL for each in judgements if each["slower"] == slower] for slower in slowdowns]
    return slowdowns, [100 * sum(each) / len(each) for each in found]


LIVE = """## Live: {count} judgements

{alarms}

Steps of both kinds run in pairs in random order, as in `measure`, until the verdict is decided or 50 s are over.

{tables}

"""

PAGE = """# How far a time verdict can be trusted

Written by `python -m studies.verdicts report`, from what `tox -e verdicts` measured with real processes on two shared
cores. Recordings are in `verdicts/recordings.jsonl`, and judgements of rounds, if any, in `verdicts/judgements.jsonl`.
A step is forward and backward of a layer, repeated some dozens of times, on one rank or on two that all-reduce the
gradients in four buckets. The slower step does more of the same work, by a known share. Neighbours are other processes:
`busy` has one that is busy on and off, `drift` one that grows busier, `spikes` two with short bursts. Each verdict
has its share of the error of a run of {judgements}, as at laptop scale.

In real time ([`chrt --rr 1 pytest perf`](budgets.md#beside-neighbours)) neighbours get only the time that the ranks
leave, and a twentieth of each second. Otherwise they take turns with the ranks.

![The power curve](verdicts.svg)

{measured}## Recorded: {replays} judgements of {steps} steps

Steps in a row, in {recordings} recordings{loads}.
Each judgement starts at a random place of a recording. For each pair of steps a coin chooses the slower one, whose time
is multiplied. The statistics depend on the coin alone, so other throws on the same steps are other judgements of the
same machine. A judgement is undecided if the recording ends first, however short it is. Both steps of a pair meet the
same noise; these figures leave out pairs in which one implementation varies more by itself.

{alarms_again}

{again}
"""

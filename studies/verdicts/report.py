"""docs/verdicts.md, from the runs."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from shardmark.rows.turns import MOST_PROCESSES
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval
from shardmark.verdict.slowdown import FEWEST_PAIRS, FEWEST_PROCESSES, Paired, error_of_processes, slowdown
from studies.verdicts.runs import STALL

REPLAYS = 30_000
"""Rows that are replayed."""

Run = dict[str, Any]


def write(folder: Path) -> None:
    """Write the page beside the folder."""
    runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    equal = [run for run in runs if run["slower"] == 0]
    folder.with_suffix(".md").write_text(
        PAGE.format(
            count=len(runs),
            tables="\n\n".join(_tables(runs)),
            alarms=_alarms(equal),
            spread=_spread(equal),
            seconds=f"{median(run['seconds'] for run in runs):.0f}",
        )
    )


def _tables(runs: Sequence[Run]) -> Iterable[str]:
    for real_time in (False, True):
        for ranks in (1, 2):
            found = [run for run in runs if (run["real_time"], run["ranks"]) == (real_time, ranks)]
            if found:
                title = f"{ranks} rank{'s' * (ranks > 1)}{', --real-time' * real_time}"
                yield f"{title}:\n\n{_table(found)}"


def _table(runs: Sequence[Run]) -> str:
    groups: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs:
        slower = run["slower"] if isinstance(run["slower"], str) else f"{run['slower']}%"
        where = "none" if run["neighbour"] == "none" else "one or two"
        groups[slower, where, run["step"]].append(run)
    order = ["0%", "5%", "10%", STALL]
    lines = [
        "| slower by | neighbours | step ms | runs | fail | undecided | pass | median s | most s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (slower, where, step), found in sorted(groups.items(), key=lambda each: (order.index(each[0][0]), each[0][1:])):
        counts = [sum(run["verdict"] == verdict for run in found) for verdict in (FAIL, UNDECIDED, PASS)]
        seconds = [run["seconds"] for run in found]
        cells = (slower, where, step, len(found), *counts, f"{median(seconds):.0f}", f"{max(seconds):.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _alarms(equal: Sequence[Run]) -> str:
    """False alarms among the equal versions, and among replays of their processes."""
    failed = sum(run["verdict"] == FAIL for run in equal)
    bound = f" With 95% confidence that is less than 1 in {len(equal) / 3:.0f}." if equal and not failed else ""
    generator, wrong, rows = random.Random(0), 0, 0
    groups: dict[tuple[int, int, bool], list[Run]] = defaultdict(list)
    for run in equal:
        groups[run["step"], run["ranks"], run["neighbour"] == "none"].append(run)
    alike = [found for found in groups.values() if sum(len(run["processes"]) for run in found) >= MOST_PROCESSES]
    for _ in range(REPLAYS if alike else 0):
        # Equal versions: which of the two is the new one is a coin's choice, process by process.
        found = generator.choice(alike)
        processes = generator.sample([each for run in found for each in _processes(run)], MOST_PROCESSES)
        signs = [generator.choice((-1, 1)) for _ in processes]
        rows += 1
        ratios, means = ([each[i] ** sign for each, sign in zip(processes, signs, strict=True)] for i in (0, 1))
        wrong += _would_fail(ratios, means, median(map(_width, found)))
    pairs = sum(len(run["processes"]) for found in alike for run in found)
    replayed = (
        f" Replays of {pairs} of their pairs of processes, {MOST_PROCESSES} at a time of runs alike, by a coin for each"
        f" pair that chooses the newer version, with intervals as wide as theirs: {wrong} of {rows:,} rows failed, at"
        f" any look after 3 to {MOST_PROCESSES} processes ({'; '.join(_name(found) for found in alike)})."
    )
    return f"{failed} of {len(equal)} runs of equal versions failed.{bound}{replayed if rows else ''}"


def _processes(run: Run) -> list[tuple[float, float]]:
    """The ratio of the median steps and of the mean steps in each pair of processes."""
    return list(zip(run["processes"], run["means"], strict=True))


def _name(found: Sequence[Run]) -> str:
    run = found[0]
    beside = "no neighbour" if run["neighbour"] == "none" else "one or two"
    return f"steps of {run['step']} ms, ranks: {run['ranks']}, neighbours: {beside}"


def _width(run: Run) -> float:
    """How far the interval's lower end lies below the ratio, by logarithm, for one process."""
    return (
        math.log(run["ratio"] / run["interval"][0]) * math.sqrt(len(run["processes"])) if run["interval"] else math.inf
    )


def _would_fail(ratios: Sequence[float], means: Sequence[float], width: float) -> bool:
    """Whether the processes fail at one of the looks, after each of them from the third on."""
    for count in range(FEWEST_PROCESSES, len(ratios) + 1):
        center, mean = (math.exp(fmean(map(math.log, each[:count]))) for each in (ratios, means))
        together = Interval(center, center * math.exp(-width / math.sqrt(count)), math.inf, 1.0)
        error = error_of_processes(means[:count])
        found = Paired(together, mean, error, tuple(ratios[:count]), tuple(means[:count]), FEWEST_PAIRS)
        if slowdown(found).verdict() == FAIL:
            return True
    return False


def _spread(equal: Sequence[Run]) -> str:
    """The standard deviation of equal versions' ratios between processes, by the length of the step."""
    lines = [
        "| step ms | ranks | neighbours | runs | pairs of processes | spread between them |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[int, int, str], list[Run]] = defaultdict(list)
    for run in equal:
        groups[run["step"], run["ranks"], "none" if run["neighbour"] == "none" else "one or two"].append(run)
    for key, found in sorted(groups.items()):
        spreads = [stdev(math.log(ratio) for ratio in run["processes"]) for run in found if len(run["processes"]) > 1]
        if spreads:
            count = sum(len(run["processes"]) for run in found)
            least, most = (f"{100 * each:.2g}%" for each in (min(spreads), max(spreads)))
            shown = least if len(spreads) == 1 else f"{least} to {most}"
            lines.append(f"| {' | '.join(map(str, (*key, len(found), count, shown)))} |")
    return "\n".join(lines)


PAGE = """# What the gate finds, and how often it errs

Written by `python -m studies.verdicts report`. Each of the {count} runs is the command that people type, in fresh
processes, in a repository made for it: `pytest --against-ref before`, with a step of passes forward and backward
through two layers that does a known share more of them than the version before, or does three times as many every
twentieth time (the mean is 10% longer). On two ranks it also all-reduces gradients in four buckets. Two shared cores;
neighbours are other processes: `busy`, on and off in turns; `drift`, busier and busier; `spikes`, two with bursts. A
run has {seconds} s in the median, with all that pytest does.

{tables}

A run that is undecided passes, and its last line says which slowdowns are not excluded; `--undecided fail` and
`--largest-slowdown` fail it.

## Equal versions

{alarms}

The standard deviation of the ratio between pairs of fresh processes of equal versions, in one run:

{spread}

[verdicts/planted.txt](verdicts/planted.txt) has planted changes and what the gate prints of each.
"""

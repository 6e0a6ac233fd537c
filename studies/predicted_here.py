"""Predicted beside measured steps of the laptop scale on this machine: docs/predicted-here.md's table, made again.

    python -m studies.predicted_here [--ranks 1] [--link 1gbit] [-k data_parallel]

Predictions from single operators and real steps take turns. The median step counts. The time that other processes had
its core is taken off one rank's step. It stays in those of several ranks, as their own threads are among the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from impl.checkpointing.cases import CASES as CHECKPOINTING
from impl.data_parallel.cases import CASES as DATA_PARALLEL
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.cases import CASES as FSDP
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from impl.sharded_optimizer.cases import CASES as SHARDED_OPTIMIZER
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step.cases import STEP_TIMES
from impl.training_step.workload import CheckpointedStep, LanguageModelStep
from shardmark.api import registry
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.on_ranks import step_seconds
from shardmark.predict.simulation.this_machine import Machine
from shardmark.ranks.link import Link
from shardmark.ranks.worlds import Worlds

TURNS, STEPS = 2, 5
STRATEGIES = (
    ("data_parallel", ("naive", "flat", "overlapped", "bucketed", "ddp"), DataParallelStep, DATA_PARALLEL),
    ("sharded_optimizer", ("unsharded", "zero_redundancy", "sharded"), ShardedStep, SHARDED_OPTIMIZER),
    ("fsdp", ("sharded", "fsdp1", "fsdp2"), FSDPStep, FSDP),
)


@dataclass(frozen=True)
class Row:
    """One case, in seconds."""

    family: str
    implementation: str
    case: str
    ranks: int
    link: str
    predicted: float
    measured: float
    waited: float
    """Share of the measured steps for which a rank was ready to run and had no core."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        figures = f"{1e3 * self.predicted:.1f} | {1e3 * self.measured:.1f} | {self.error:+.1%} | {self.waited:.0%}"
        return f"| {self.family} | {self.implementation} | {self.case} | {self.ranks} | {self.link} | {figures} |"


HEAD = (
    "| family | implementation | case | ranks | link | predicted ms | measured ms | error | waited for a core |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def plans(ranks: int) -> Iterator[Plan]:
    """The laptop scale's training steps on that many ranks."""

    def plan(family: str, name: str, workload: type[Any], case: Any) -> Plan:
        return Plan(workload, registry.resolve(family, name), None, case, "cpu", ranks)

    if ranks == 1:
        for case in STEP_TIMES.laptop:
            yield plan("training_step", "eager", LanguageModelStep, case)
        for name in registry.family("checkpointing").implementations:
            for case in CHECKPOINTING.laptop:
                yield plan("checkpointing", name, CheckpointedStep, case)
    for family, names, workload, grid in STRATEGIES:
        for case in grid.laptop:
            sharded = isinstance(case, FSDPCase | ShardedStepCase)
            for name in names:
                yield plan(family, name, workload, replace(case, ranks=ranks) if sharded else case)


def row(machine: Machine, plan: Plan, link: str | None) -> Row:
    """Predict and measure in turns; the operators' times are measured anew each time."""
    predicted, measured = [], []
    for _ in range(TURNS):
        machine.forget()
        predicted.append(machine.step(plan).seconds)
        ranks = machine.worlds.get(plan.world_size).run(step_seconds, plan, STEPS * plan.world_size)
        measured += list(zip(*ranks, strict=True))
    waited = sum(w for each in measured for _, w in each) / sum(s for each in measured for s, _ in each)
    # On several ranks nothing is subtracted: one rank may wait for a core that another one uses.
    taken = [max(seconds - waited * (len(each) == 1) for seconds, waited in each) for each in measured]
    return Row(
        plan.implementation.family,
        plan.implementation.name,
        str(plan.case),
        plan.world_size,
        link or "none",
        median(predicted),
        median(taken),
        waited,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m studies.predicted_here", description="Predicted beside measured steps.")
    parser.add_argument("--link", help="only two ranks, on two hosts joined at that rate: 1gbit")
    parser.add_argument("--ranks", type=int, default=[1, 2], nargs="*", help="on how many; 1 2 where not said")
    parser.add_argument("-k", default="", help="only rows with this in their names")
    parser.add_argument("--out", type=Path, help="also append each row to this file")
    given = parser.parse_args(arguments)
    os.environ.setdefault("PYTEST_XDIST_WORKER_COUNT", "2")  # one thread a rank, on one rank too
    with ExitStack() as stack:
        link = stack.enter_context(Link(given.link)) if given.link else None
        worlds = Worlds("cpu", link)
        stack.callback(worlds.close)
        machine = Machine(worlds)
        print(HEAD)
        rows = []
        for ranks in (2,) if link else given.ranks:
            for plan in plans(ranks):
                if given.k in f"{plan.implementation.family} {plan.implementation} {plan.case} {ranks}":
                    rows.append(row(machine, plan, given.link))
                    print(rows[-1], flush=True)
                    if given.out:
                        with given.out.open("a") as file:
                            file.write(f"{rows[-1]}\n")
    print("\n".join(summary(rows)))
    return 0


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The median error of each family on each number of ranks, and of all."""

    def group(row: Row) -> tuple[str, int, str]:
        return row.family, row.ranks, row.link

    for (family, ranks, link), each in groupby(sorted(rows, key=group), group):
        errors = [abs(row.error) for row in each]
        yield f"{family}, {ranks} ranks, link {link}: median error {median(errors):.1%} of {len(errors)} rows"
    if rows:
        yield f"all: median error {median(abs(row.error) for row in rows):.1%} of {len(rows)} rows"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

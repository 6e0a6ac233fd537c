"""How well does a training step scale over the ranks, strongly and weakly?

Efficiency is against one rank that has as many cores as each of the ranks. On CPU ranks share the machine's cores and
their memory, so its ceiling is cores over ranks where there are more ranks than cores, and nobody reaches it where
memory is what limits the step; on CUDA each rank has a device of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl.data_parallel.accounting import work as data_parallel_work
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.accounting import work as fsdp_work
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from impl.training_step.cases import ScalingCase, TrainingStepCase
from shardmark.api import Grid, Implementation, Race, Work
from shardmark.meter.clock import Laps
from shardmark.meter.communication import tcp_bytes_sent
from shardmark.meter.measure_case import shuffled, timed_steps
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, PEER, Identity, Measured, Plan
from shardmark.plugin import WorldsBySize
from shardmark.plugin.measure import Measure
from shardmark.ranks.rank import available_cores
from shardmark.ranks.world import World
from shardmark.report.observed_answers import efficiencies
from shardmark.report.plots import Lines
from shardmark.rows.columns import Column
from shardmark.rows.fill import step_seconds
from shardmark.rows.row import Row
from shardmark.text import ms
from shardmark.verdict.betting import interval, paired_ratios

KINDS = ("strong", "weak")


def _on_cuda(kind: str, model: str, dtype: str = "bfloat16") -> ScalingCase:
    return ScalingCase(kind, model, batch=8, context=512, dtype=dtype)


CASES = Grid(
    smoke=[ScalingCase(kind, "tiny", batch=4, context=32) for kind in KINDS],
    laptop=[ScalingCase(kind, "mini", batch=4, context=32) for kind in KINDS],
    paper=[_on_cuda(kind, model) for model in ("small", "large") for kind in KINDS],
    full=[
        _on_cuda(kind, model, dtype)
        for dtype in ("bfloat16", "float32")
        for model in ("small", "large")
        for kind in KINDS
    ],
)


def _efficiency(entry: Row, row: Row) -> str | None:
    work = row["work"]
    return f"{work['efficiency']:.0%} of {work['efficiency_ceiling']:.0%}" if "efficiency" in work else None


ONE_RANK = Column("one rank ms", lambda entry, row: ms(s) if (s := row["work"].get("one_rank_seconds")) else None)
EFFICIENCY = Column("efficiency", _efficiency)

pytestmark = [
    pytest.mark.question(
        "How well does a training step scale over the ranks?",
        short="scaling",
        columns=["case", "implementation", "ranks", "time ms", ONE_RANK, EFFICIENCY, "sent / least MiB"],
        answer=efficiencies,
        plots=[
            Lines(
                "Efficiency by ranks",
                x="world_size",
                x_title="ranks",
                y="work.efficiency",
                y_title="efficiency",
                panels="case.kind",
                limit="work.efficiency_ceiling",
                limit_title="ceiling",
                start=(1, 1.0),
                log_y=False,
            )
        ],
    ),
    pytest.mark.cases(CASES),
]

ROUNDS, STEPS, WARMUPS = 3, 3, 2
"""Turns of each world; timed steps in a turn; untimed steps before them."""


def timed_on_rank(plan: Plan, threads: int) -> list[Laps]:
    """This rank's timed steps, on that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return timed_steps(plan, WARMUPS + STEPS)[WARMUPS:]
    finally:
        torch.set_num_threads(before)


def sent_in_a_step(plan: Plan) -> tuple[str, int]:
    """The backend, and the bytes that this rank's connections send."""
    workload = plan.workload(plan.implementation, plan.case, plan.device)
    dist.barrier()
    before = tcp_bytes_sent()
    workload.step(lambda part: None)
    dist.barrier()  # the last of it has left
    return workload.backend, tcp_bytes_sent() - before


@pytest.mark.family("data_parallel", only=("bucketed",))
def test_data_parallel(
    implementation: Implementation, case: ScalingCase, world: World, worlds: WorldsBySize, measure: Measure
) -> None:
    work = data_parallel_work(case.on(world.size), world.size)
    _scale(DataParallelStep, implementation, case, case.on, work, world, worlds, measure)


@pytest.mark.family("fsdp", only=("sharded",))
def test_fsdp(
    implementation: Implementation, case: ScalingCase, world: World, worlds: WorldsBySize, measure: Measure
) -> None:
    def on(ranks: int) -> FSDPCase:
        return FSDPCase(**asdict(case.on(ranks)), ranks=ranks)

    _scale(FSDPStep, implementation, case, on, fsdp_work(on(world.size)), world, worlds, measure)


def _scale(
    workload: type[Any],
    implementation: Implementation,
    case: ScalingCase,
    on: Callable[[int], TrainingStepCase],
    work: Work,
    world: World,
    worlds: WorldsBySize,
    measure: Measure,
) -> None:
    """Time a strategy's steps on one rank and on all of them in turns, and keep the row."""
    ranks = world.size
    if ranks == 1:
        pytest.skip("one rank is what the others are held to")
    plans = {n: Plan(workload, implementation, None, on(n), world.device, n) for n in (1, ranks)}
    threads = max(1, available_cores() // ranks)
    laps: dict[int, list[list[Laps]]] = {n: [[] for _ in range(n)] for n in plans}
    for _ in range(ROUNDS):
        for n in shuffled(list(plans)):
            for mine, new in zip(laps[n], worlds(n).run(timed_on_rank, plans[n], threads), strict=True):
                mine += [Laps(lap.seconds) for lap in new]
    backends, sent = zip(*world.run(sent_in_a_step, plans[ranks]), strict=True)
    (alone,) = laps[1]
    measured = [Measured(backends[0], Memory(), {IMPLEMENTATION: mine, PEER: alone}) for mine in laps[ranks]]
    ratio = interval(paired_ratios(step_seconds(measured), step_seconds(measured, PEER))).center
    figures = {
        "efficiency": case.efficiency(ranks, ratio),
        "efficiency_ceiling": min(1.0, available_cores() / ranks) if world.device == "cpu" else 1.0,
        **({"bytes_sent": max(sent)} if world.device == "cpu" else {}),
    }
    family, name = implementation.family, implementation.name
    identity = Identity(family, name, case, world.device, ranks, called=implementation.called)
    measure.record(
        identity,
        measured,
        time=Race("one rank"),
        work=work,
        rates=lambda seconds: {"one_rank_seconds": seconds / ratio, **figures},
    )

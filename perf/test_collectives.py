"""How fast is each collective, by size, and what does it put on the wire?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from impl.collectives.accounting import bus_bandwidth, bytes_sent
from impl.collectives.cases import COLLECTIVES, CollectiveCase
from shardmark.api import Grid, Implementation, Mark, Work
from shardmark.meter.communication import tcp_bytes_sent
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.observed_answers import fastest_by_collective
from shardmark.report.plots import Lines


def _cases(*megabytes: int) -> list[CollectiveCase]:
    return [CollectiveCase(collective, size) for collective in COLLECTIVES for size in megabytes]


SIZES = Grid(
    smoke=_cases(1),
    laptop=[*_cases(1, 25), CollectiveCase("all_reduce", 100)],
    paper=_cases(1, 25, 1024),
    full=_cases(1, 10, 25, 100, 1024),
)

LARGE_ALL_REDUCE = Grid(
    smoke=[CollectiveCase("all_reduce", 10)],
    laptop=[CollectiveCase("all_reduce", 1024)],
    paper=[],
)
"""Measured for the backend alone; with a peer it would take minutes."""


pytestmark = [
    pytest.mark.question(
        "How fast is each collective, by size?",
        short="collectives",
        columns=["case", "implementation", "time ms", "algbw GB/s", "busbw GB/s", "sent / least MiB", "verdict"],
        answer=fastest_by_collective,
        plots=[
            Lines(
                "Bus bandwidth by size",
                "case.megabytes",
                "work.bus_bandwidth",
                "B/s",
                "MB",
                "busbw",
                panels="case.collective",
            )
        ],
    ),
    pytest.mark.benchmark(max_time=0.1),
]


class Collective:
    """One collective of each rank's tensors: an all-reduce in place, the others out of place."""

    def __init__(self, implementation: Implementation, case: CollectiveCase, device: str) -> None:
        self.backend = dist.get_backend()
        large, small = case.elements, case.elements // case.ranks
        arguments = {"all_reduce": [large], "reduce_scatter": [small, large], "all_gather": [large, small]}
        self.tensors = [torch.ones(elements, device=device) for elements in arguments[case.collective]]
        self.collective = getattr(implementation.adapted, case.collective)

    def prepare(self) -> None:
        """Keep the values small however often they are summed."""
        self.tensors[0].mul_(1 / dist.get_world_size())

    def step(self, mark: Mark) -> None:
        """One collective."""
        self.collective(*self.tensors)


def sent_over_tcp(implementation: Implementation, case: CollectiveCase, device: str) -> int:
    """Bytes that this rank's connections sent during one step."""
    collective = Collective(implementation, case, device)
    dist.barrier()
    before = tcp_bytes_sent()
    collective.step(lambda part: None)
    dist.barrier()  # the last of it has left
    return tcp_bytes_sent() - before


def _measure(measure: Measure, implementation: Implementation, case: CollectiveCase, world: World) -> None:
    ranks = world.size
    if ranks == 1:
        pytest.skip("one rank has nothing to communicate")
    case = replace(case, ranks=ranks)
    sent = max(world.run(sent_over_tcp, implementation, case, world.device)) if world.device == "cpu" else None
    outputs = ranks * case.bytes // (ranks if case.collective == "reduce_scatter" else 1)
    inputs = ranks * case.bytes // (ranks if case.collective == "all_gather" else 1)
    measure(
        Collective,
        implementation,
        case,
        world_size=ranks,
        work=Work(
            flops=0 if case.collective == "all_gather" else (ranks - 1) * case.elements,
            bytes_moved=inputs + outputs,
            bytes_communicated=bytes_sent(case.collective, case.bytes, ranks),
        ),
        slack=1.02,
        rates=lambda seconds: {
            "algorithm_bandwidth": case.bytes / seconds,
            "bus_bandwidth": bus_bandwidth(case.collective, case.bytes, seconds, ranks),
            **({"bytes_sent": sent} if sent is not None else {}),
        },
    )


@pytest.mark.family("collectives")
@pytest.mark.cases(SIZES)
def test_collective(implementation: Implementation, case: CollectiveCase, world: World, measure: Measure) -> None:
    _measure(measure, implementation, case, world)


@pytest.mark.family("collectives", only=("backend",))
@pytest.mark.cases(LARGE_ALL_REDUCE)
@pytest.mark.benchmark(min_rounds=3)  # of seconds each
def test_large_all_reduce(implementation: Implementation, case: CollectiveCase, world: World, measure: Measure) -> None:
    _measure(measure, implementation, case, world)

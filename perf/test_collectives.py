"""How fast is each collective, by size, and what does it put on the wire?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from impl.collectives.accounting import bus_bandwidth, bytes_sent
from impl.collectives.cases import COLLECTIVES, KB, CollectiveCase
from impl.collectives.workload import Collective
from perf.published import beside
from shardmark.api import MB, Grid, Implementation, Work
from shardmark.meter.communication import tcp_bytes_sent
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.observed_answers import fastest_by
from shardmark.report.plots import Lines


def _cases(*sizes: int) -> list[CollectiveCase]:
    return [CollectiveCase(collective, size) for collective in COLLECTIVES for size in sizes]


SIZES = Grid(
    smoke=_cases(MB),
    laptop=[*_cases(4 * KB, MB, 25 * MB), CollectiveCase("all_reduce", 100 * MB)],
    paper=_cases(8, 4 * KB, 256 * KB, 4 * MB, 64 * MB, 1024 * MB, 8192 * MB),  # a case that does not fit is not started
    full=_cases(8, 4 * KB, 256 * KB, MB, 4 * MB, 10 * MB, 25 * MB, 64 * MB, 100 * MB, 1024 * MB, 8192 * MB),
)
"""Latency decides at 8 bytes, bandwidth from some 64 MB on."""

LARGE_ALL_REDUCE = Grid(
    smoke=[CollectiveCase("all_reduce", 10 * MB)],
    laptop=[CollectiveCase("all_reduce", 1024 * MB)],
    paper=[],
)
"""Measured for the backend alone; with a peer it would take minutes."""


pytestmark = [
    pytest.mark.question(
        "How fast is each collective, by size?",
        short="collectives",
        columns=["case", "implementation", "time ms", "algbw GB/s", "busbw GB/s", "sent / least MiB", "verdict"],
        answer=fastest_by("collective"),
        plots=[
            Lines(
                "Bus bandwidth by size",
                "case.size",
                "work.bus_bandwidth",
                "B/s",
                "bytes",
                "busbw",
                panels="case.collective",
            ),
            beside.ALL_REDUCE,
        ],
    ),
    pytest.mark.benchmark(max_time=0.1),
]


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

"""How fast is an all-reduce, by size?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from impl.accounting.collectives import all_reduce_bytes_sent, bus_bandwidth
from shardmark import cases
from shardmark.cases import AllReduceCase, Work
from shardmark.measure import Measure
from shardmark.passes import Mark
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = [pytest.mark.family("collectives"), pytest.mark.question("How fast is an all-reduce, by size?")]


class AllReduce:
    """A sum over the ranks of one tensor on each, in place."""

    def __init__(self, implementation: Implementation, case: AllReduceCase, device: str) -> None:
        self.collectives = implementation.adapted
        self.backend = dist.get_backend()
        self.tensor = torch.rand(case.bytes // 4, device=device)

    def prepare(self) -> None:
        """Keep the values small however often they are summed."""
        self.tensor.mul_(1 / dist.get_world_size())

    def step(self, mark: Mark) -> None:
        """One all-reduce."""
        self.collectives.all_reduce(self.tensor)


@pytest.mark.cases(cases.ALL_REDUCE)
def test_all_reduce(implementation: Implementation, case: AllReduceCase, world: World, measure: Measure) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to reduce")
    ranks, nbytes = world.size, case.bytes
    measure(
        AllReduce,
        implementation,
        case,
        world_size=ranks,
        work=Work(
            flops=(ranks - 1) * nbytes // 4,
            bytes_moved=2 * ranks * nbytes,  # each rank reads its own tensor and writes the sum
            bytes_communicated=all_reduce_bytes_sent(nbytes, ranks),
        ),
        rates=lambda seconds: {
            "algorithm_bandwidth": nbytes / seconds,
            "bus_bandwidth": bus_bandwidth(nbytes, seconds, ranks),
        },
    )

"""Data parallelism in part of the world: two groups side by side, and ranks outside of both."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from correctness.data_parallel.averaging import (
    Products,
    backward,
    group_ranks,
    values,
    wrap,
    wrong_averages,
)
from correctness.engine import histories_on_ranks
from correctness.support.on_ranks import assert_nothing_wrong
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")

LIKE = [torch.empty(4, 3), torch.empty(5)]


def _wrong_in(implementation: Implementation, group: dist.ProcessGroup, steps: int, device: str) -> list[str]:
    """Describe wrong starting values and wrong averages in a process group."""
    rank, ranks = dist.get_rank(), group_ranks(group)
    model = wrap(implementation, Products(*values(rank, *LIKE, step=9)).to(device), process_group=group)
    where = f"in a process group of ranks {ranks}"
    wrong = [
        f"{where}: {name!r} does not begin as on the group's first rank"
        for (name, p), first in zip(model.module.named_parameters(), values(ranks[0], *LIKE, step=9), strict=True)
        if not torch.equal(p.detach().cpu(), first)
    ]
    for step in range(steps):
        model.module.zero_grad()
        with model.no_sync():
            backward(model, values(rank, *LIKE, step=2 * step), device)
        backward(model, values(rank, *LIKE, step=2 * step + 1), device)
        model.finish_gradient_synchronization()

        def own(other: int, step: int = step) -> list[Tensor | None]:
            passes = [values(other, *LIKE, step=2 * step + i) for i in range(2)]
            return [sum(terms) for terms in zip(*passes, strict=True)]

        wrong += wrong_averages(model, own, f"{where}, step {step + 1}", group)
    return wrong


def first_rank_and_others(implementation: Implementation, device: str) -> list[str]:
    """Rank 0 is alone in one group; all other ranks form another."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(members) for members in ([0], [*range(1, ranks)]) if members]
    return _wrong_in(implementation, groups[min(rank, 1)], 2, device)


def even_and_odd_ranks(implementation: Implementation, device: str) -> list[str]:
    """Groups of even and of odd ranks; the even group takes one more step."""
    side, group = histories_on_ranks.even_and_odd_ranks()
    return _wrong_in(implementation, group, 2 + (side == 0), device)


@pytest.mark.parametrize("side_by_side", [first_rank_and_others, even_and_odd_ranks], ids=lambda f: f.__name__)
def test_only_the_ranks_of_the_process_group_take_part(
    implementation: Implementation, world: World, side_by_side: object, device: str
) -> None:
    assert_nothing_wrong(world.run(side_by_side, implementation, device))


def all_but_the_last_rank(implementation: Implementation, device: str) -> list[str]:
    ranks = [*range(dist.get_world_size() - 1)]
    group = dist.new_group(ranks)
    return _wrong_in(implementation, group, 2, device) if dist.get_rank() in ranks else []


def test_a_rank_outside_the_process_group_takes_no_part(
    implementation: Implementation, world: World, device: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank is in every group")
    assert_nothing_wrong(world.run(all_but_the_last_rank, implementation, device))

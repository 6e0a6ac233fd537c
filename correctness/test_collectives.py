"""Every implementation of the collectives against sums and concatenations done by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("collectives")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def _input(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rank's own numbers: small integers, so that every dtype's sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (size,), generator=generator).to(dtype)


def collective_on_rank(implementation: Implementation, name: str, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """This rank's result; outputs begin as the largest number the dtype has, so that what is not written shows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = {"all_reduce": size, "reduce_scatter": ranks * size, "all_gather": size}
    tensor = _input(rank, lengths[name], dtype).to(device)
    if name == "all_reduce":
        implementation.adapted.all_reduce(tensor)
        return tensor.cpu()
    limits = torch.iinfo(dtype) if dtype == torch.int64 else torch.finfo(dtype)
    output = torch.full((size if name == "reduce_scatter" else ranks * size,), limits.max, dtype=dtype, device=device)
    getattr(implementation.adapted, name)(output, tensor)
    return output.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
def test_result_is_the_one_done_by_hand(
    implementation: Implementation, world: World, name: str, size: int, dtype: torch.dtype, device: str
) -> None:
    results = world.run(collective_on_rank, implementation, name, size, dtype, device)
    ranks = world.size
    length = ranks * size if name == "reduce_scatter" else size
    inputs = torch.stack([_input(rank, length, dtype) for rank in range(ranks)])
    for rank, found in enumerate(results):
        expected = {
            "all_reduce": inputs.sum(0),
            "reduce_scatter": inputs.sum(0)[rank * size : (rank + 1) * size],
            "all_gather": inputs.flatten(),
        }[name]
        assert torch.equal(found, expected)

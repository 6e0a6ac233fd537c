"""Every implementation of the collectives against sums and concatenations done by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.accounting import collectives as accounting
from shardmark.cases import COLLECTIVES
from shardmark.registry import Implementation
from shardmark.world import World, available_ranks

OURS = ("ring", "direct")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
SIZES = [0, 1, 97]
"""Elements of the smaller tensor, or of an all-reduce's, which most numbers of ranks do not divide."""


@pytest.fixture(scope="module", params=range(1, 9), ids=lambda n: f"{n}ranks")
def any_world(request: pytest.FixtureRequest, device: str) -> Iterator[World]:
    """A world of each size up to eight, one after the other."""
    if available_ranks(device) < request.param:
        pytest.skip(f"needs {request.param} ranks")
    with World(request.param, device) as world:
        yield world


def _input(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rank's own numbers: small integers, so that every dtype's sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (size,), generator=generator).to(dtype)


def _run(target: object, name: str, size: int, dtype: torch.dtype, in_place: bool, device: str) -> tuple[Tensor, ...]:
    """What a collective made of this rank's input, what it should have, and the input out of place, before and after.

    Outputs begin as the largest number the dtype has, so that what is not written shows.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = [_input(other, ranks * size if name == "reduce_scatter" else size, dtype) for other in range(ranks)]
    mine = inputs[rank].to(device, copy=True)
    if name == "all_reduce":
        target.all_reduce(mine)
        return mine.cpu(), torch.stack(inputs).sum(0, dtype=dtype)
    own = slice(rank * size, (rank + 1) * size)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    output = torch.full((size if name == "reduce_scatter" else ranks * size,), limits.max, dtype=dtype, device=device)
    if in_place and name == "reduce_scatter":
        output = mine[own]
    if in_place and name == "all_gather":
        mine = output[own].copy_(mine)
    getattr(target, name)(output, mine)
    expected = torch.stack(inputs).sum(0, dtype=dtype)[own] if name == "reduce_scatter" else torch.cat(inputs)
    untouched = () if in_place else (mine.cpu(), inputs[rank])
    return output.cpu(), expected, *untouched


def wrong_results(
    implementation: Implementation, name: str, device: str, dtypes: list[torch.dtype], segment_bytes: int | None
) -> list[str]:
    """What this rank found wrong, over sizes and dtypes, out of place and in place."""
    wrong = []
    with _segments_of(segment_bytes):
        for dtype, size, in_place in product(dtypes, SIZES, [True] if name == "all_reduce" else [False, True]):
            results = _run(implementation.adapted, name, size, dtype, in_place, device)
            if not all(torch.equal(*pair) for pair in zip(results[::2], results[1::2], strict=True)):
                wrong.append(f"{size} of {dtype}, {in_place=}: {[x[:5].tolist() for x in results]}"[:200])
    return wrong


@contextmanager
def _segments_of(nbytes: int | None) -> Iterator[None]:
    """Cut parts into segments of that size, so that small tensors have many."""
    before = accounting.SEGMENT_BYTES
    accounting.SEGMENT_BYTES = nbytes or before
    try:
        yield
    finally:
        accounting.SEGMENT_BYTES = before


@pytest.mark.family("collectives")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_are_those_done_by_hand_on_one_to_eight_ranks(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    assert any_world.run(wrong_results, implementation, name, device, DTYPES, None) == [[]] * any_world.size


@pytest.mark.family("collectives", only=OURS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_do_not_depend_on_the_segments(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    assert any_world.run(wrong_results, implementation, name, device, [torch.float32], 40) == [[]] * any_world.size

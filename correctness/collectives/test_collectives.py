"""Every implementation of the collectives against sums and concatenations done by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import Backend, OnGloo, accounting, count_bytes_sent, segments
from impl.collectives.cases import COLLECTIVES
from shardmark.registry import Implementation
from shardmark.wire import tcp_bytes_sent
from shardmark.world import World, available_ranks

OURS = ("ring", "direct")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
SIZES = [0, 1, 97]
"""Elements of the smaller tensor, or of an all-reduce's, which most numbers of ranks do not divide."""


RANKS = [pytest.param(n, marks=[pytest.mark.sweep] if n in (4, 5) else []) for n in range(1, 9)]
"""Four and five are left to the sweep: there are a power of two, an odd and an even number without them."""


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}ranks")
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
    before = segments.SEGMENT_BYTES
    segments.SEGMENT_BYTES = nbytes or before
    try:
        yield
    finally:
        segments.SEGMENT_BYTES = before


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


def random_sum(implementation: Implementation, device: str) -> tuple[Tensor, Tensor]:
    """This rank's parameter, of several segments, before and after it was summed."""
    mine = torch.randn(3, 300_001, device=device)
    total = torch.nn.Parameter(mine.clone())
    implementation.adapted.all_reduce(total)
    return mine.cpu(), total.detach().cpu()


@pytest.mark.family("collectives")
def test_every_rank_has_the_same_sum_to_the_bit(implementation: Implementation, world: World, device: str) -> None:
    ranks = world.run(random_sum, implementation, device)
    terms = torch.stack([mine for mine, _ in ranks]).double()
    # Each of n - 1 sums is rounded, in whatever order: Higham, Accuracy and Stability, 4.2.
    rounded = (world.size - 1) * torch.finfo(torch.float32).eps / 2
    bound = rounded / (1 - rounded) * terms.abs().sum(0)
    for _, total in ranks:
        assert torch.equal(total, ranks[0][1])
        assert ((total.double() - terms.sum(0)).abs() <= bound).all()


def bytes_counted(implementation: Implementation, name: str, elements: int, device: str) -> int:
    """What this rank counts as sent; `elements` of the larger tensor, in float64."""
    ranks = dist.get_world_size()
    arguments = {
        "all_reduce": [elements],
        "reduce_scatter": [elements // ranks, elements],
        "all_gather": [elements, elements // ranks],
    }
    tensors = [torch.zeros(n, dtype=torch.float64, device=device) for n in arguments[name]]
    with count_bytes_sent() as sent:
        getattr(implementation.adapted, name)(*tensors)
    getattr(implementation.adapted, name)(*tensors)  # is not counted
    return sent.nbytes


@pytest.mark.family("collectives", only=OURS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_sent_are_those_of_theory(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    n = any_world.size
    elements = 840 * 300 + (1 if name == "all_reduce" else 0)  # the parts of which are of two sizes
    exact = {"ring": accounting.ring_bytes_sent, "direct": accounting.direct_bytes_sent}[implementation.name]
    sent = any_world.run(bytes_counted, implementation, name, elements, device)
    assert sent == [exact(name, elements, 8, rank, n) for rank in range(n)]
    assert sum(sent) == (2 if name == "all_reduce" else 1) * (n - 1) * elements * 8
    if name != "all_reduce":
        assert sent == [accounting.bytes_sent(name, elements * 8, n)] * n


MEGABYTES = 8


def bytes_on_the_wire(target: object, name: str) -> float:
    """What the kernel counts as sent by this rank, as a share of the larger tensor."""
    ranks = dist.get_world_size()
    large = torch.zeros(MEGABYTES * 2**18)
    small = large[: large.numel() // ranks].clone()
    tensors = {"all_reduce": [large], "reduce_scatter": [small, large], "all_gather": [large, small]}[name]
    dist.barrier()
    before = tcp_bytes_sent()
    getattr(target, name)(*tensors)
    dist.barrier()  # the last of it has left
    return (tcp_bytes_sent() - before) / large.nbytes


def test_gloos_reduce_scatter_is_an_all_reduce_and_ours_moves_half_the_bytes(device: str) -> None:
    """2(n-1)/n and (n-1)/n, to a hundredth; what is chosen for Gloo moves no more than it must."""
    with World(2, "cpu") as world:
        shares = {name: world.run(bytes_on_the_wire, Backend(), name) for name in COLLECTIVES}
        ours = {name: world.run(bytes_on_the_wire, OnGloo(), name) for name in COLLECTIVES}
    assert shares["reduce_scatter"] == pytest.approx([1, 1], abs=0.01)
    for name, fraction in {"all_reduce": 1, "reduce_scatter": 0.5, "all_gather": 0.5}.items():
        assert ours[name] == pytest.approx([fraction] * 2, abs=0.01)

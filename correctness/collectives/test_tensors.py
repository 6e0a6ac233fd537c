"""Tensors that collectives take: several segments, several dimensions, views, and numbers of every magnitude."""

from collections.abc import Callable
from functools import cache
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.summing import Call, Inputs, largest, small_integers
from correctness.engine.histories_on_ranks import group_of
from correctness.support.contracts import is_ours
from correctness.support.on_ranks import on_every_rank
from impl.collectives.cases import COLLECTIVES
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("collectives")


@pytest.mark.parametrize("name", COLLECTIVES)
@on_every_rank
def test_results_of_several_segments(implementation: Implementation, name: str, device: str) -> list[str]:
    """Each rank's part has several MiB and an odd number of elements."""
    wrong = []
    for in_place in [False] if name == "all_reduce" else [False, True]:
        elements = 2_400_011 if name == "all_reduce" else 800_003
        call = Call(name, small_integers(torch.float32), elements, device, in_place=in_place)
        call.start(implementation.watched)
        wrong += call.wrong()
    return wrong


@cache
def _of_21_bits(elements: int) -> Tensor:
    """Integers whose sums over up to eight ranks are exact in float32 and in no narrower dtype."""
    return ((torch.arange(elements) * 2_654_435_761) % 2**21).float()


@on_every_rank
def test_the_neighbours_in_a_buffer_may_be_written_meanwhile(implementation: Implementation, device: str) -> list[str]:
    """A gradient is reduced while backward writes the one beside it, in a buffer of both."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for elements, dtype in ((5, torch.float32), (3, torch.bfloat16), (1, torch.float64)):
        buffer = torch.zeros(elements + 6, dtype=dtype, device=device)
        before, own, after = buffer.split([3, elements, 3])
        own.fill_(rank + 1)
        handle = implementation.watched.all_reduce(own, async_op=True)
        before.fill_(7)
        after.fill_(9)
        handle.wait()
        expected = [7.0] * 3 + [ranks * (ranks + 1) / 2] * elements + [9.0] * 3
        if buffer.tolist() != expected:
            wrong.append(f"of {dtype}, neighbours written meanwhile: {buffer.tolist()}, expected {expected}")
    return wrong


@pytest.mark.judged
@pytest.mark.parametrize("name", COLLECTIVES)
@on_every_rank
def test_each_element_of_large_tensors_is_exact(implementation: Implementation, name: str, device: str) -> list[str]:
    """The larger tensor has an odd number of elements just above a power of two of bytes, up to 64 MiB, or, of an
    all-reduce, one more than a power of two for each rank: implementations change their algorithm, their dtype or their
    segments with the size."""
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for power in range(12, 27):
        part = ((2**power // 4) // ranks + 3) | 1
        numbers = _of_21_bits(2**24 + 4 * ranks + 1)[: ranks * part]
        if name == "all_reduce":
            # One element is left after whole segments. Above 2^24 float32 has no odd number, and rounds it down.
            numbers = numbers[: ranks * 2 ** (power - 2 - (ranks - 1).bit_length()) + 1]
        own = slice(rank * part, (rank + 1) * part)
        if name == "all_gather":
            given, expected = [torch.empty_like(numbers), numbers[own] + rank], numbers.clone()
            for other, piece in enumerate(expected.split(part)):
                piece += other
        else:
            total = numbers * ranks + ranks * (ranks - 1) // 2
            scatter = name == "reduce_scatter"
            given = [torch.empty(part), numbers + rank] if scatter else [numbers + rank]
            expected = total[own] if scatter else total
        tensors = [x.to(device) for x in given]
        getattr(implementation.watched, name)(*tensors)
        found = tensors[0].cpu()
        if not torch.equal(found, expected):
            bad = (found != expected).nonzero()
            i = int(bad[0])
            wrong.append(
                f"{name} of {found.numel()} float32: {len(bad)} elements are wrong, the first at [{i}]: "
                f"found {found[i].item()!r}, expected {expected[i].item()!r}"
            )
            break
    return wrong


def of_every_magnitude(dtype: torch.dtype) -> Inputs:
    """Draw floats of every magnitude that leaves room for sums, some of which are not finite, and integers with as many
    digits."""

    def draw(rank: int, elements: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        if not dtype.is_floating_point:
            limit = torch.iinfo(dtype).max // 16
            return torch.randint(-limit, limit, (elements,), generator=generator).to(dtype)
        limit = {torch.float64: 300, torch.float16: 8}.get(dtype, 60)
        exponents = torch.randint(-limit, limit + 1, (elements,), generator=torch.Generator().manual_seed(99))
        numbers = torch.randn(elements, generator=generator, dtype=torch.float64)
        numbers = torch.ldexp(numbers, exponents)  # same magnitude on all ranks
        for i, of_ranks in enumerate(NOT_FINITE):
            numbers[i::50] = of_ranks.get(rank, 1.0)
        return numbers.to(dtype)

    return draw


NOT_FINITE = ({0: torch.inf}, {1: -torch.inf}, {0: torch.inf, 1: -torch.inf}, {0: torch.nan})
"""Terms by rank, the others are ones. A loss scaler must see on every rank what is not finite on one."""


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


LARGE = pytest.param((600_011,), id="large", marks=pytest.mark.judged)
"""Implementations may have another algorithm, or send fewer bits, above some MiB."""


@pytest.mark.parametrize("sizes", [pytest.param((101, 70_001), id="small"), LARGE])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@on_every_rank
def test_sums_are_as_exact_as_the_dtype(
    implementation: Implementation, dtype: torch.dtype, sizes: tuple[int, ...], device: str
) -> list[str]:
    target, wrong = implementation.watched, []
    for name, elements, async_op in product(("all_reduce", "reduce_scatter"), sizes, (False, True)):
        call = Call(name, of_every_magnitude(dtype), elements, device)
        handle = call.start(target, async_op)
        if async_op:
            handle.wait()
        wrong += call.wrong()
    return wrong


def beyond_the_limits(dtype: torch.dtype) -> Inputs:
    """Draw integers whose sum the dtype has, and of which two may have a sum that it lacks: one of a rank's, and by
    pairs of ranks one and the same number less. Each rank has each place in some elements."""
    limit, ranks = torch.iinfo(dtype).max, dist.get_world_size()

    def draw(rank: int, elements: int) -> Tensor:
        generator = torch.Generator().manual_seed(99)
        terms = [torch.randint(limit // 2, limit // 4 * 3, (elements,), generator=generator) for _ in range(ranks)]
        for i in range(2, ranks, 2):
            terms[i] = -terms[i - 1]
        if ranks % 2 == 0:
            terms[-1] = torch.randint(-9, 9, (elements,), generator=generator)
        places = (torch.arange(elements) + rank) % ranks
        return torch.stack(terms)[places, torch.arange(elements)].to(dtype)

    return draw


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@on_every_rank
def test_sums_of_integers_may_leave_the_dtype_on_the_way(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> list[str]:
    """Integers come back from beyond the limits, and neither stay there nor turn into floats."""
    wrong = []
    for name, elements in product(("all_reduce", "reduce_scatter"), (101, 70_001)):
        call = Call(name, beyond_the_limits(dtype), elements, device)
        call.start(implementation.watched, async_op=False)
        wrong += call.wrong()
    return wrong


SIZES = (7, 1001, 40_000, 300_003)


def random_sums(implementation: Implementation, sizes: tuple[int, ...], device: str) -> list[Tensor]:
    """Sums by blocking and by asynchronous calls in the world, and by blocking ones in another group of all ranks."""
    generator, totals = torch.Generator().manual_seed(dist.get_rank()), []
    another = group_of(tuple(range(dist.get_world_size())))
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for (group, async_op), dtype, size in product(((None, False), (None, True), (another, False)), dtypes, sizes):
        total = torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)
        handle = implementation.watched.all_reduce(total, group, async_op=async_op)
        if async_op:
            handle.wait()
        totals.append(total.cpu())
    return totals


@pytest.mark.parametrize("sizes", [pytest.param(SIZES, id="small"), LARGE])
def test_every_rank_has_the_same_sum_to_the_bit(
    implementation: Implementation, world: World, sizes: tuple[int, ...], device: str
) -> None:
    """Few elements and many, as implementations may switch algorithms between them."""
    ranks = world.run(random_sums, implementation, sizes, device)
    for rank, totals in enumerate(ranks):
        for mine, first in zip(totals, ranks[0], strict=True):
            differ = int((mine != first).sum())
            assert not differ, (
                f"{differ} of {len(mine)} elements of an all-reduce of {mine.dtype} on rank {rank} are rounded "
                "otherwise than on rank 0"
            )


BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


@on_every_rank
def test_what_is_gathered_has_the_bits_that_were_sent(implementation: Implementation, device: str) -> list[str]:
    """Gather arbitrary bits (negative zeros, subnormals, infinities, NaNs); describe what changed."""
    ranks, wrong = dist.get_world_size(), []
    for (dtype, bits), size in product(BITS.items(), SIZES[:3]):
        end = 2 ** (8 * bits.itemsize - 1) - 1
        drawn = [
            torch.randint(-end, end, (size,), generator=torch.Generator().manual_seed(r)).to(bits) for r in range(ranks)
        ]
        for each in drawn:
            each[0] = -end - 1  # -0.0
        output = torch.zeros(ranks * size, dtype=dtype, device=device)
        implementation.watched.all_gather(output, drawn[dist.get_rank()].to(device).view(dtype))
        differ = int((output.view(bits).cpu() != torch.cat(drawn)).sum())
        if differ:
            wrong.append(f"all_gather of {dtype}: {differ} of {ranks * size} elements have other bits than were sent")
    return wrong


@pytest.mark.parametrize("name", COLLECTIVES)
@on_every_rank
def test_tensors_of_several_dimensions_and_views(implementation: Implementation, name: str, device: str) -> list[str]:
    """Use multi-dimensional views inside larger tensors, some without elements; describe wrong results and writes
    around the views."""
    target, ranks, wrong = implementation.watched, dist.get_world_size(), []
    for dtype, small in product((torch.float32, torch.int64), ((3, 2, 5), (3, 0, 5), (0, 2))):
        large = (ranks * small[0], *small[1:])
        shapes = {"all_reduce": [small], "reduce_scatter": [small, large], "all_gather": [large, small]}[name]
        call = Call(name, small_integers(dtype), prod(small), device)
        around = [largest(dtype).to(device).repeat(tensor.numel() + 14) for tensor in call.tensors]
        views = [tensor[7:-7].copy_(own) for tensor, own in zip(around, call.tensors, strict=True)]
        call.tensors = [view.view(shape) for view, shape in zip(views, shapes, strict=True)]
        call.start(target)
        call.tensors[1:] = [tensor.flatten() for tensor in call.tensors[1:]]
        wrong += [f"{line}, of the shapes {shapes}" for line in call.wrong()]
        for tensor, shape in zip(around, shapes, strict=True):
            if not bool((torch.cat([tensor[:7], tensor[-7:]]) == largest(dtype).to(device)).all()):
                wrong.append(f"{name}: it writes around a tensor of shape {shape} that is a view of a larger one")
    return wrong


@on_every_rank
def test_a_tensor_without_dimensions(implementation: Implementation, device: str) -> list[str]:
    tensor = torch.tensor(dist.get_rank() + 1.0, device=device)
    implementation.watched.all_reduce(tensor)
    ranks = dist.get_world_size()
    expected = ranks * (ranks + 1) / 2
    found = f"an all-reduce of a tensor without dimensions is {tensor.item()} and not {expected}"
    return [] if tensor.item() == expected else [found]


def parameter_sum(implementation: Implementation, device: str) -> bool:
    """Return True if a parameter is summed without `torch.no_grad()`."""
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    try:
        implementation.watched.all_reduce(parameter)
    except RuntimeError:  # torch refuses the in-place change
        return False
    return bool((parameter == dist.get_world_size()).all())


def test_a_parameter_is_summed(
    implementation: Implementation, world: World, device: str, record_property: Callable[[str, object], None]
) -> None:
    if not all(world.run(parameter_sum, implementation, device)):
        assert not is_ours(implementation)
        record_property("note", "all_reduce takes no tensor that requires a gradient: call it in torch.no_grad()")

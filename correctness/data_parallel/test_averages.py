"""Gradients are averages over the ranks: simple cases first, rare ones last."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.averaging import (
    Products,
    backward,
    bucket_sizes,
    needs_backward_on_every_rank,
    values,
    wrap,
    wrong_averages,
)
from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.support.default_dtype import OTHERS, default_dtype
from correctness.support.on_ranks import assert_nothing_wrong, on_every_rank
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")

Gradients = list[Tensor | None]
OwnInStep = Callable[[int, int, list[Tensor]], Gradients]
"""`own(step, rank, like)` returns a rank's gradients before averaging, in the shapes and dtypes of `like`."""


def normal(step: int, rank: int, like: list[Tensor]) -> Gradients:
    return [*values(rank, *like, step=step)]


def averages(
    implementation: Implementation, like: list[Tensor], device: str, own: OwnInStep = normal, steps: int = 2
) -> list[str]:
    """Wrong averages after each step, one line each; gradients are set to None before each step."""
    rank, wrong = dist.get_rank(), []
    for options in bucket_sizes(implementation):
        module = Products(*map(torch.zeros_like, like)).to(device)
        model = wrap(implementation, module, find_unused_parameters=True, **options)
        for step in range(steps):
            if any(set(own(step, other, like)) == {None} for other in range(dist.get_world_size())):
                needs_backward_on_every_rank(model)
            model.module.zero_grad()
            backward(model, own(step, rank, like), device)
            model.finish_gradient_synchronization()
            when = f"in step {step + 1}" + (f" with {options}" if options else "")
            wrong += wrong_averages(model, lambda other, step=step: own(step, other, like), when)
    return wrong


def test_gradients_are_the_average_over_the_ranks(implementation: Implementation, world: World, device: str) -> None:
    like = [torch.empty(4, 3), torch.empty(5), torch.empty(6, 6)]
    assert_nothing_wrong(world.run(averages, implementation, like, device, normal, 3))


SHAPES = {
    "odd": [torch.empty(1), torch.empty(97), torch.empty(11, 7), torch.empty(1025)],
    "many": [torch.empty(1 + i % 4) for i in range(70)],
    "no_dimensions": [torch.empty(()), torch.empty(2)],
    "no_elements": [torch.empty(0, 3), torch.empty(3)],
    "transposed": [torch.empty(5, 7).T, torch.empty(3)],
    "channels_last": [torch.empty(3, 4, 5, 2).to(memory_format=torch.channels_last)],
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_gradients_of_any_shape(implementation: Implementation, world: World, shapes: str, device: str) -> None:
    assert_nothing_wrong(world.run(averages, implementation, SHAPES[shapes], device))


@pytest.mark.examples(1, 4, 12)
def test_no_gradient_is_left_of_any_number(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    for count in BESIDE_LAUNCHES[:examples]:
        like = [torch.empty(1)] * count
        assert_nothing_wrong(world.run(averages, implementation, like, device, normal, 1))


def counted(step: int, rank: int, like: list[Tensor]) -> Gradients:
    """Numbers with many significant digits, cheap to make."""
    values = [(torch.arange(x.numel()) % 99_991 + 100 * rank + 0.37).to(x.dtype).view(x.shape) for x in like]
    return [torch.empty_like(x).copy_(each) for x, each in zip(like, values, strict=True)]


LARGE = {
    "in a line": [torch.empty(n) for n in (7, 262_145, 100_003, 700_001)],
    "transposed": [torch.empty(521, 1031).T, torch.empty(7), torch.empty(257, 255).T],
    "channels_last": [torch.empty(61, 67, 13, 11).to(memory_format=torch.channels_last), torch.empty(7)],
}
"""Odd sizes, most above 1 MiB."""


@pytest.mark.parametrize("layout", LARGE)
def test_gradients_of_large_parameters(implementation: Implementation, world: World, layout: str, device: str) -> None:
    like = LARGE[layout]
    assert_nothing_wrong(world.run(averages, implementation, like, device, counted, 1))


class Sums(nn.Module):
    """The sum of all parameters, times a scale."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(n) for n in sizes)

    def forward(self, scale: float) -> Tensor:
        """Loss ()."""
        return sum(p.sum() for p in self.p) * scale


@on_every_rank
def test_gradients_that_are_more_than_25_mib_together(implementation: Implementation, device: str) -> list[str]:
    """25 MiB is the usual bucket size."""
    model = wrap(implementation, Sums(3_500_001, 5, 3_800_003).to(device))
    model(1.0001 + dist.get_rank()).backward()
    model.finish_gradient_synchronization()
    mean = 0.5001 + dist.get_world_size() / 2
    extremes = {name: [*map(float, p.grad.aminmax())] for name, p in model.module.named_parameters()}
    return [
        f"the gradient of {name!r} lies between {least} and {most}, and the average over the ranks is {mean}"
        for name, (least, most) in extremes.items()
        if not mean * (1 - 1e-6) <= least <= most <= mean * (1 + 1e-6)
    ]


def of_every_size(step: int, rank: int, like: list[Tensor]) -> Gradients:
    """Numbers of every magnitude that leaves room for sums; same magnitude on all ranks."""
    exponents = torch.Generator().manual_seed(step)
    return [
        torch.ldexp(x.double(), torch.randint(-limit, limit + 1, x.shape, generator=exponents)).to(x.dtype)
        for x in values(rank, *like, step=step)
        for limit in [{torch.float64: 300, torch.float16: 8}.get(x.dtype, 60)]
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)
def test_gradients_are_reduced_in_their_own_precision(
    implementation: Implementation, world: World, dtype: torch.dtype, device: str
) -> None:
    like = [torch.empty(1001, dtype=dtype), torch.empty(100_103, dtype=dtype)]
    assert_nothing_wrong(world.run(averages, implementation, like, device, of_every_size, 1))


@on_every_rank
def test_another_default_dtype_rounds_neither_parameters_nor_gradients(
    implementation: Implementation, device: str
) -> list[str]:
    """Parameters are float32; a buffer that is made without a dtype has the job's default."""
    like, wrong = [torch.empty(1001), torch.empty(33, 7)], []
    for default in OTHERS:
        module, when = Products(*values(dist.get_rank(), *like)).to(device), f"where the default dtype is {default}"
        with default_dtype(default):
            model = wrap(implementation, module)
            start = [p.detach().cpu().clone() for p in module.p]
            for step in (1, 2):
                module.zero_grad()
                backward(model, values(dist.get_rank(), *like, step=step), device)
                model.finish_gradient_synchronization()
        if not all(map(torch.equal, start, values(0, *like))):
            wrong.append(f"{when}: float32 parameters do not begin as rank 0's")
        wrong += wrong_averages(model, lambda rank: normal(2, rank, like), when)
    return wrong


def gradients(implementation: Implementation, device: str) -> list[Tensor]:
    like = [torch.empty(1001), torch.empty(33, 7)]
    model = wrap(implementation, Products(*map(torch.zeros_like, like)).to(device))
    backward(model, values(dist.get_rank(), *like), device)
    model.finish_gradient_synchronization()
    return [p.grad.cpu() for p in model.module.parameters()]


def test_gradients_are_the_same_on_every_rank_to_the_bit(
    implementation: Implementation, world: World, device: str
) -> None:
    """Without equal bits the ranks' parameters would drift apart."""
    ranks = world.run(gradients, implementation, device)
    for rank, found in enumerate(ranks):
        differ = sum(int((mine != first).sum()) for mine, first in zip(found, ranks[0], strict=True))
        assert not differ, f"{differ} elements of the averages on rank {rank} are rounded otherwise than on rank 0"


THREE = [torch.empty(3), torch.empty(4), torch.empty(2, 2)]


def only_rank_0_has_the_second(step: int, rank: int, like: list[Tensor]) -> Gradients:
    """In odd steps only rank 0 has the second gradient; in even steps every rank has all gradients."""
    return [x if i != 1 or rank == 0 or step % 2 == 0 else None for i, x in enumerate(normal(step, rank, like))]


def each_rank_lacks_another(step: int, rank: int, like: list[Tensor]) -> Gradients:
    return [None if i == (rank + step) % len(like) else x for i, x in enumerate(normal(step, rank, like))]


def zeros_on_rank_0(step: int, rank: int, like: list[Tensor]) -> Gradients:
    return [x * (rank > 0) for x in values(rank, *like, step=step)]


@pytest.mark.parametrize(
    "own", [only_rank_0_has_the_second, each_rank_lacks_another, zeros_on_rank_0], ids=lambda own: own.__name__
)
def test_a_gradient_that_a_rank_does_not_have_counts_as_zero(
    implementation: Implementation, world: World, own: Any, device: str
) -> None:
    assert_nothing_wrong(world.run(averages, implementation, THREE, device, own, 4))


def no_rank_has_the_second(step: int, rank: int, like: list[Tensor]) -> Gradients:
    return [x if i != 1 or step == 0 else None for i, x in enumerate(normal(step, rank, like))]


def test_a_parameter_that_no_rank_uses_has_no_gradient_or_zeros(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_nothing_wrong(world.run(averages, implementation, THREE, device, no_rank_has_the_second, 3))


def rank_0_has_none(step: int, rank: int, like: list[Tensor]) -> Gradients:
    return [x if rank or step != 1 else None for x in normal(step, rank, like)]


@pytest.mark.should("a rank without a backward pass counts as zero")
def test_a_rank_without_a_backward_pass_counts_as_zero(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_nothing_wrong(world.run(averages, implementation, THREE, device, rank_0_has_none, 3))


@on_every_rank
def test_frozen_parameters_have_no_gradient(implementation: Implementation, device: str) -> list[str]:
    module = Products(torch.zeros(3), torch.zeros(4), torch.zeros(2))
    module.p[1].requires_grad_(False)
    model = wrap(implementation, module.to(device))
    own = [x if i != 1 else None for i, x in enumerate(values(dist.get_rank(), *module.p))]
    backward(model, own, device)
    model.finish_gradient_synchronization()
    found = model.module.p[1].grad
    return [] if found is None else [f"the gradient of the frozen 'p.1' is {found.tolist()} and not None"]


@pytest.mark.should("a parameter may be frozen for a while after wrapping")
@on_every_rank
def test_a_parameter_that_was_frozen_for_a_while_is_averaged_again(
    implementation: Implementation, device: str
) -> list[str]:
    """Wrong averages while the second of three parameters is frozen, and after it is unfrozen."""
    model = wrap(implementation, Products(*map(torch.zeros_like, THREE)).to(device), find_unused_parameters=True)
    wrong = []
    for step, when in enumerate(("before it is frozen", "while it is frozen", "once it is trainable again")):
        model.module.zero_grad()
        model.module.p[1].requires_grad_(step != 1)

        def own(rank: int, step: int = step) -> Gradients:
            return [x if i != 1 or step != 1 else None for i, x in enumerate(values(rank, *THREE, step=step))]

        backward(model, own(dist.get_rank()), device)
        model.finish_gradient_synchronization()
        wrong += wrong_averages(model, own, f"of three parameters, the second {when}")
    return wrong


def not_finite(step: int, rank: int, like: list[Tensor]) -> Gradients:
    """A loss scaler must find rank 0's infinity and NaN on every rank."""
    gradients = values(rank, *like, step=step)
    if rank == 0:
        gradients[0].view(-1)[1], gradients[1].view(-1)[0] = torch.inf, torch.nan
    return [*gradients]


def test_what_is_not_finite_on_one_rank_is_not_on_any(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_nothing_wrong(world.run(averages, implementation, THREE, device, not_finite, 1))

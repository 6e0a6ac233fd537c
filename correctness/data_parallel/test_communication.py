"""Communication of a data-parallel wrapper in a step; delays on any rank must not change the averages."""

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from correctness.data_parallel.averaging import (
    Products,
    backward,
    bucket_sizes,
    values,
    wrap,
    wrong_averages,
)
from correctness.support.communication import delayed, recorded, slow_gradients
from correctness.support.on_ranks import assert_nothing_wrong, on_every_rank
from shardmark.api import Implementation
from shardmark.meter.communication import Communication
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")

FLAGS = 64
"""Bytes that a wrapper may communicate besides gradients, for example to agree on used parameters."""


@pytest.mark.parametrize("late", [pytest.param(0, id="first", marks=pytest.mark.judged), pytest.param(-1, id="last")])
@on_every_rank
def test_averages_are_there_when_it_returns(implementation: Implementation, late: int, device: str) -> list[str]:
    """Delay one rank's collectives; check the averages as soon as `finish_gradient_synchronization()` returns."""
    like, rank, wrong = [torch.empty(5), torch.empty(3, 3), torch.empty(2)], dist.get_rank(), []
    model = wrap(implementation, Products(*map(torch.zeros_like, like)).to(device))
    for step in range(2):
        model.module.zero_grad()
        with delayed(before=0.04, on=late % dist.get_world_size()):
            backward(model, values(rank, *like, step=step), device)
            model.finish_gradient_synchronization()
        when = f"as finish_gradient_synchronization() returns in step {step + 1}, with a rank that is late"
        wrong += wrong_averages(model, lambda other, step=step: [*values(other, *like, step=step)], when)
        dist.barrier()
    return wrong


@on_every_rank
def test_ranks_whose_gradients_arrive_in_another_order(implementation: Implementation, device: str) -> list[str]:
    """Gradients of one shape arrive in a different order on each rank and in each step."""
    like, rank, wrong = [torch.empty(3, 2) for _ in range(4)], dist.get_rank(), []
    for options in bucket_sizes(implementation):
        model = wrap(implementation, Products(*map(torch.zeros_like, like)).to(device), **options)
        for step in range(3):
            model.module.zero_grad()
            order = [(rank + step + i * (1 if rank % 2 else 3)) % 4 for i in range(4)]
            with slow_gradients(model.module, lambda i: 0.003 * ((rank + i) % 2)):
                backward(model, values(rank, *like, step=step), device, order=order)
                model.finish_gradient_synchronization()
            when = f"in step {step + 1}, with gradients that arrive in another order on each rank"
            wrong += wrong_averages(model, lambda other, step=step: [*values(other, *like, step=step)], when)
    return wrong


def _communicated(
    implementation: Implementation, module: Products, device: str, **options: Any
) -> tuple[Any, list[Communication]]:
    """Take two steps; return the model and this rank's messages in the second, as the first may be special."""
    model = wrap(implementation, module.to(device), **options)
    for step in range(2):
        model.module.zero_grad()
        weights = [
            x if p.requires_grad else None
            for p, x in zip(module.p, values(dist.get_rank(), *module.p, step=step), strict=True)
        ]
        with recorded() as sent:
            backward(model, weights, device)
            model.finish_gradient_synchronization()
    return model, [each for each in sent if each.name != "receive"]


def tied(implementation: Implementation, device: str) -> tuple[list[str], int, int]:
    """The third parameter is the first: describe wrong gradients; return bytes communicated with and without the
    tie."""
    like = [torch.zeros(1003), torch.zeros(50, 3)]
    module = Products(*map(torch.clone, like))
    module.p.append(module.p[0])
    model, sent = _communicated(implementation, module, device)
    if len([*model.module.parameters()]) != 2:
        return ["after wrapping: a parameter of two names has become two parameters"], 0, 0

    def own(rank: int) -> list[Tensor | None]:
        first, second, again = values(rank, *like, like[0], step=1)
        return [first + again, second]

    wrong = wrong_averages(model, own, "with a parameter that is used under two names")
    _, untied = _communicated(implementation, Products(*like), device)
    return wrong, sum(each.nbytes for each in sent), sum(each.nbytes for each in untied)


@pytest.mark.should("a tied parameter is communicated once")
def test_tied_parameters_are_averaged_and_communicated_once(
    implementation: Implementation, world: World, device: str
) -> None:
    ranks = world.run(tied, implementation, device)
    assert_nothing_wrong([wrong for wrong, _, _ in ranks])
    for _, found, untied in ranks:
        assert found <= untied + FLAGS, (
            f"with a parameter of 4012 bytes that has two names, a step communicates {found} bytes, and without its "
            f"second name {untied}"
        )


def frozen(implementation: Implementation, device: str) -> tuple[int, int]:
    """Bytes communicated with a frozen parameter, and without it."""
    module = Products(torch.zeros(101), torch.zeros(1003))
    module.p[1].requires_grad_(False)
    _, sent = _communicated(implementation, module, device)
    _, without = _communicated(implementation, Products(torch.zeros(101)), device)
    return sum(each.nbytes for each in sent), sum(each.nbytes for each in without)


@pytest.mark.should("frozen parameters are not communicated")
def test_frozen_parameters_are_not_communicated(implementation: Implementation, world: World, device: str) -> None:
    for found, without in world.run(frozen, implementation, device):
        assert found <= without + FLAGS, (
            f"with a frozen parameter of 4012 bytes a step communicates {found} bytes, and without it {without}"
        )


def as_counted(implementation: Implementation, bucket_mb: float, dtype: torch.dtype, device: str) -> list[str]:
    """Describe messages above the bucket size in a step that communicates float32 gradients in another dtype."""
    sizes = [10_007] * 40
    _, sent = _communicated(
        implementation, Products(*map(torch.zeros, sizes)), device, bucket_mb=bucket_mb, reduce_dtype=dtype
    )
    most = max((each.nbytes // dtype.itemsize for each in sent if each.dtype == dtype), default=0)
    if 4 * most > bucket_mb * 2**20 + 4 * sizes[0]:
        return [
            f"with reduce_dtype={dtype} and bucket_mb={bucket_mb}, gradients that are {4 * most} bytes in their own "
            f"dtype are communicated at once, more than one parameter of {4 * sizes[0]} above"
        ]
    return []


@pytest.mark.should("bucket_mb is counted in the gradients' dtype")
@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_bucket_mb_is_counted_in_the_gradients_dtype(
    implementation: Implementation, world: World, dtype: torch.dtype, device: str
) -> None:
    if not implementation.accepts("reduce_dtype"):
        pytest.skip("its signature has no option 'reduce_dtype'")
    assert_nothing_wrong(world.run(as_counted, implementation, 0.25, dtype, device))


def in_buckets(implementation: Implementation, bucket_mb: float, seed: int, device: str) -> list[str]:
    """Describe messages of wrong sizes in a step with random parameters of several dtypes."""
    draw = random.Random(seed)
    dtypes = draw.choice([[dtype] for dtype in MIXED] + [MIXED[:2], MIXED[1:], MIXED])
    sizes = [draw.choice([10_007, draw.randrange(2_000, 12_000)]) for _ in range(40)]
    module = Products(*(torch.zeros(n, dtype=dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)))
    _, sent = _communicated(implementation, module, device, bucket_mb=bucket_mb)
    wrong, size = [], int(bucket_mb * 2**20)
    for dtype in dtypes:
        of = [p.nbytes for p in module.p if p.dtype == dtype]
        messages = [each for each in sent if each.dtype == dtype and each.nbytes > FLAGS and each.name != "send"]
        found = sorted((each.nbytes for each in messages), reverse=True)
        rounds = len({each.name for each in messages})  # a reduce-scatter and an all-gather are two rounds
        what = f"{len(of)} parameters of {dtype}, which are {sum(of)} bytes, with bucket_mb={bucket_mb}"
        what += f" (dtypes take turns: {dtypes})" * (len(dtypes) > 1) + f", {size} bytes: "
        if sum(found) and (over := [nbytes for nbytes in found if nbytes > size + max(of)]):
            wrong.append(f"{what}{over[0]} are communicated at once, more than one parameter of {max(of)} above")
        short = [nbytes for nbytes in found[: -max(rounds, 1)] if nbytes < min(size, 2**20) - max(of)]
        if short:
            wrong.append(f"{what}{short[:3]} are communicated at once, more than one parameter of {max(of)} below")
    return wrong


MIXED = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.should("bucket_mb is the size of what is communicated at once")
@pytest.mark.examples(3, 10, 40)
@pytest.mark.family("data_parallel", option="bucket_mb")
def test_bucket_mb_is_the_size_of_what_is_communicated_at_once(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    """A bucket may be one parameter larger or smaller; the last bucket of each dtype takes the rest."""
    if world.size == 1:
        pytest.skip("one rank may communicate nothing")
    for seed in torch.randint(2**31, (examples,)).tolist():
        assert_nothing_wrong(world.run(in_buckets, implementation, random.Random(seed).choice(SIZES), seed, device))


SIZES = [25, 1, 0.1, 0.1, 0.05]


@pytest.mark.family("data_parallel", option="bucket_mb")
@on_every_rank
def test_buckets_of_any_size_average(implementation: Implementation, device: str) -> list[str]:
    """Buckets that one gradient fills exactly, or several together, and buckets of all sizes between."""
    like, wrong = [torch.empty(n) for n in (3, 8, 5, 8, 16)], []
    for nbytes in range(4, 4 * 42, 4):
        model = wrap(implementation, Products(*map(torch.zeros_like, like)).to(device), bucket_mb=nbytes / 2**20)
        backward(model, values(dist.get_rank(), *like), device)
        model.finish_gradient_synchronization()
        wrong += wrong_averages(model, lambda other: [*values(other, *like)], f"in buckets of {nbytes} bytes")
    return wrong[:1]


def reduced_in(implementation: Implementation, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, int]:
    """Return (gradient, this rank's own, bytes communicated) of one parameter."""
    like = torch.zeros(64, 65)
    model, sent = _communicated(implementation, Products(like), device, reduce_dtype=dtype)
    return model.module.p[0].grad.cpu(), values(dist.get_rank(), like, step=1)[0], sum(each.nbytes for each in sent)


@pytest.mark.family("data_parallel", option="reduce_dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_narrower_reduction_sends_half_and_rounds_each_term_once(
    implementation: Implementation, world: World, dtype: torch.dtype, device: str
) -> None:
    ranks, wide = (
        world.run(reduced_in, implementation, dtype, device),
        world.run(reduced_in, implementation, torch.float32, device),
    )
    own = torch.stack([gradient for _, gradient, _ in ranks]).double()
    unit = torch.finfo(dtype).eps / 2
    # Rounded once: each term, each of the n - 1 additions, and the average: Higham, Accuracy and Stability, 4.2.
    roundings = (world.size + 1) * unit
    bound = roundings / (1 - roundings) * own.abs().mean(0)
    for (found, _, sent), (_, _, before) in zip(ranks, wide, strict=True):
        assert found.dtype == torch.float32, f"the gradient is of {found.dtype}, and its parameter of torch.float32"
        assert sent <= before / 2 + FLAGS, f"reduce_dtype={dtype} sends {sent} bytes, and torch.float32 {before}"
        assert ((found.double() - own.mean(0)).abs() <= bound).all(), f"the average is further off than {dtype} rounds"
        assert not torch.equal(found, own.mean(0).float()), f"reduce_dtype={dtype} rounds nothing"


WIRE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.family("data_parallel", option="reduce_dtype")
@on_every_rank
def test_reduce_dtype_is_the_dtype_on_the_wire(implementation: Implementation, device: str) -> list[str]:
    """For each pair of dtypes: reduce_dtype may be wider or narrower than the gradients'."""
    wrong = []
    for own, wire in product(WIRE, WIRE):
        like, what = torch.zeros(64, 65, dtype=own), f"gradients of {own} with reduce_dtype={wire}"
        model, sent = _communicated(implementation, Products(like), device, reduce_dtype=wire)
        floating = [each for each in sent if each.dtype.is_floating_point and each.nbytes > FLAGS]
        wrong += [f"{what}: it communicates {each}" for each in floating if each.dtype != wire]
        if dist.get_world_size() > 1 and (total := sum(each.nbytes for each in sent)) < like.numel() * wire.itemsize:
            wrong.append(f"{what}: it communicates {total} bytes, and there are {like.numel()} elements")
        if (found := model.module.p[0].grad.dtype) != own:
            wrong.append(f"{what}: the gradient becomes one of {found}")
    return wrong

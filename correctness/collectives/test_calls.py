"""Modes of autograd around a call, and memory that stays after calls of many sizes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from correctness.collectives.summing import Call, small_integers
from correctness.support.contracts import Note, is_ours
from correctness.support.metering import device_of_rank
from correctness.support.on_ranks import assert_nothing_wrong, on_every_rank
from impl.collectives.cases import COLLECTIVES
from shardmark.api import Implementation
from shardmark.meter.memory import meter
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("collectives")

SIZES = range(40_000, 72_000, 1_000)


def around_inference_mode(implementation: Implementation, device: str) -> tuple[list[str], list[str]]:
    """Call each collective in inference mode, as an evaluation does, and outside of it afterwards; return the errors
    inside, and what is wrong."""
    refused, wrong = [], []
    for name in COLLECTIVES:
        for elements, async_op in ((97, False), (300_007, True)):
            with torch.inference_mode():
                call = Call(name, small_integers(torch.float32), elements, device)
                try:
                    handle = call.start(implementation.watched, async_op)
                    if async_op:
                        handle.wait()
                except RuntimeError as error:
                    refused.append(f"{name} in inference mode: {error}".splitlines()[0])
                else:
                    wrong += [f"in inference mode, {line}" for line in call.wrong()]
            call = Call(name, small_integers(torch.float32), elements, device)
            try:
                call.start(implementation.watched)
            except RuntimeError as error:
                wrong.append(f"after a call in inference mode, {call} is an error: {error}".splitlines()[0])
            else:
                wrong += [f"after a call in inference mode, {line}" for line in call.wrong()]
    return refused, wrong


def _assert_right(implementation: Implementation, ranks: Sequence[tuple[list[str], list[str]]], note: Note) -> None:
    """Fail for what is wrong on any rank; note what was refused, as PyTorch's own may, and ours may not."""
    assert_nothing_wrong([wrong for _, wrong in ranks])
    for refused in dict.fromkeys(line for refusals, _ in ranks for line in refusals):
        assert not is_ours(implementation) or implementation.name == "backend", refused
        note("note", refused)


def test_a_call_in_inference_mode_changes_nothing_for_later_ones(
    implementation: Implementation, world: World, device: str, record_property: Note
) -> None:
    _assert_right(implementation, world.run(around_inference_mode, implementation, device), record_property)


def of_parameters(implementation: Implementation, device: str) -> tuple[list[str], list[str]]:
    """Call with an input that requires a gradient; return what is an error, and what is wrong."""
    refused, wrong = [], []
    for name in ("reduce_scatter", "all_gather"):
        call = Call(name, small_integers(torch.float32), 97, device)
        output, input = call.tensors
        try:
            getattr(implementation.watched, name)(output, nn.Parameter(input))
        except RuntimeError as error:
            refused.append(f"{name} of a parameter: {error}".splitlines()[0])
            continue
        if output.requires_grad:
            wrong.append(f"{name} of a parameter gives an output with {output.grad_fn}: autograd follows it")
        wrong += call.wrong()
    return refused, wrong


@pytest.mark.should("results of parameters require no gradient")
def test_results_of_parameters_require_no_gradient(
    implementation: Implementation, world: World, device: str, record_property: Note
) -> None:
    """FSDP gathers from parameters: a result that autograd follows would keep every gathered copy."""
    _assert_right(implementation, world.run(of_parameters, implementation, device), record_property)


@on_every_rank
def test_memory_does_not_grow_with_the_sizes(implementation: Implementation, device: str) -> list[str]:
    """Batches and sequences have many lengths: buffers that are kept for each size add up."""
    wrong = []
    for name in COLLECTIVES:
        # Each pass has sizes of its own, as buffers of another pass would be used again.
        passes = [
            _grown(implementation, name, range(SIZES.start + i, SIZES.stop, SIZES.step), device) for i in range(3)
        ]
        wrong += min(passes, key=len)
    return wrong


def _grown(implementation: Implementation, name: str, sizes: range, device: str) -> list[str]:
    """Describe memory that calls of these sizes leave; a backend's thread may free a tensor late."""
    with meter(device_of_rank()) as memory:
        for i, elements in enumerate(sizes):
            call = Call(name, small_integers(torch.float32), elements, device)
            handle = call.start(implementation.watched, async_op=i % 2 == 0)
            if handle is not None:
                handle.wait()
            largest = sum(tensor.nbytes for tensor in call.tensors)
            del call, handle
            memory.mark("last" if i else "first")
    grown = memory.phases["last"] - memory.phases["first"]
    if grown <= 4 * largest:
        return []
    return [f"{len(sizes)} calls of {name}, each of another size, leave {grown:,} bytes behind"]


FULL, CALLS = 200, 40
"""Calls of each kind after which a log of the last 1024 is full, and those after it whose objects are counted."""


@on_every_rank
def test_objects_that_stay_do_not_grow_with_the_number_of_calls(
    implementation: Implementation, device: str
) -> list[str]:
    """A record of each call, however small, adds up over a training: what each leaves is at least a block of Python's
    allocator, which counts them without tracemalloc, that threads may crash."""
    target, ranks = implementation.watched, dist.get_world_size()
    small, large = torch.zeros(3, device=device), torch.zeros(3 * ranks, device=device)
    given = {"all_reduce": [small], "reduce_scatter": [small, large], "all_gather": [large, small]}

    def left_by(name: str, async_op: bool, calls: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(calls):
            handle = getattr(target, name)(*given[name], async_op=async_op)
            if async_op:
                handle.wait()
        del handle
        gc.collect()
        return sys.getallocatedblocks() - before

    wrong, kinds = [], [*product(COLLECTIVES, (False, True))]
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again
    for name, async_op in kinds:
        left_by(name, async_op, FULL)
    for name, async_op in kinds:
        left = min(left_by(name, async_op, CALLS) for _ in range(3))  # another thread may hold some for a moment
        if left >= CALLS // 2:
            kind = "asynchronous" if async_op else "blocking"
            wrong.append(f"{CALLS} {kind} calls of {name} with the same tensors leave {left} blocks of Python objects")
    return wrong

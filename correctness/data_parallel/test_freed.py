"""A deleted wrapper frees its parameters."""

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from correctness.data_parallel.averaging import Products, backward, values, wrap
from correctness.support.on_ranks import on_every_rank
from correctness.support.waiting import are_freed
from shardmark.api import Implementation

pytestmark = pytest.mark.family("data_parallel")


PARTS_OF_A_STEP = ("wrapping", "forward", "backward in no_sync", "backward", "finish_gradient_synchronization")


def wrap_and_delete(implementation: Implementation, last: str, device: str) -> weakref.ref:
    """The weight of a wrapper that is deleted after that part of a step."""
    model = wrap(implementation, nn.Linear(2, 2).to(device))
    with model.no_sync() if last == "backward in no_sync" else nullcontext():
        if last != "wrapping":
            loss = model(torch.ones(1, 2, device=device)).sum()
        if last not in ("wrapping", "forward"):
            loss.backward()
    if last == "finish_gradient_synchronization":
        model.finish_gradient_synchronization()
    return weakref.ref(model.module.weight)


@on_every_rank
def test_a_wrapper_that_is_deleted_frees_its_parameters(implementation: Implementation, device: str) -> list[str]:
    """As after an error, or where it has not been used at all."""
    weights = {last: wrap_and_delete(implementation, last, device) for last in PARTS_OF_A_STEP}
    are_freed(*weights.values(), seconds=2.0)
    kept = [last for last, weight in weights.items() if weight() is not None]
    return [
        f"parameters stay in memory when the wrapper is gone after {last}: something refers to it, as a hook may"
        for last in kept
    ]


@on_every_rank
def test_a_deleted_wrapper_frees_parameters_that_lacked_a_gradient(
    implementation: Implementation, device: str
) -> list[str]:
    """A cache of what stands for missing gradients must not keep their parameters: of the first two each rank lacks
    one, the third has a gradient in every other step, and the last is frozen."""
    module = Products(torch.zeros(3), torch.zeros(2, 2), torch.zeros(5), torch.zeros(4)).to(device)
    module.p[3].requires_grad_(False)
    model = wrap(implementation, module, find_unused_parameters=True)
    rank = dist.get_rank()
    for step in range(4):
        module.zero_grad()
        own = values(rank, *(p.detach().cpu() for p in module.p), step=step)
        lacking = {(rank + step) % 2, 3, 2 + step % 2}
        backward(model, [None if i in lacking else x for i, x in enumerate(own)], device)
        model.finish_gradient_synchronization()
    kept = {name: weakref.ref(p) for name, p in module.named_parameters()}
    del model, module
    if are_freed(*kept.values(), seconds=2.0):
        return []
    alive = ", ".join(name for name, p in kept.items() if p() is not None)
    return [
        f"{alive} of {len(kept)} parameters stay in memory when the wrapper is gone, after steps that lack gradients"
    ]

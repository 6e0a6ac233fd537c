"""Right checkpointing policies, written in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.models import distinct_blocks
from correctness.support.planting import right

Forward = Callable[..., Any]

TENSOR = object()
"""Place of a tensor in an output."""


@right("the blocks' forward is replaced")
def forward_replaced(model: nn.Module) -> nn.Module:
    for block in distinct_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


@right("checkpoints one block in four: it saves a little")
def every_fourth(model: nn.Module) -> nn.Module:
    for block in distinct_blocks(model)[::4]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Recomputed(torch.autograd.Function):
    """The textbook version: forward runs without a graph, backward again with one. Only inputs get gradients, and these
    have no graph."""

    @staticmethod
    def forward(ctx: Any, run: Forward, inputs: int, *tensors: Tensor) -> Any:
        device = tensors[0].device.type
        ctx.run, ctx.inputs, ctx.cpu = run, inputs, torch.get_rng_state()
        ctx.cuda = torch.cuda.get_rng_state() if device == "cuda" else None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # zeros for None would go on to what the loss does not reach
        with torch.no_grad():
            return run(tensors[:inputs], tensors[inputs:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.random.fork_rng(devices=[] if ctx.cuda is None else None), torch.enable_grad():
            torch.set_rng_state(ctx.cpu)
            if ctx.cuda is not None:
                torch.cuda.set_rng_state(ctx.cuda)
            with torch.autocast(*ctx.autocast):
                outputs = ctx.run(tensors[: ctx.inputs], tensors[ctx.inputs :])
        outs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad and grad is not None]
        of = [x for x, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad([x for x, _ in outs], of, [grad for _, grad in outs], allow_unused=True))
        return None, None, *(next(found) if need else None for need in needs)


def _may_hold(x: Any) -> bool:
    return not isinstance(x, Tensor) and (hasattr(x, "__dict__") or hasattr(x, "__slots__"))


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    if any(_may_hold(x) for x in flat):
        return type(block).forward(block, *args, **kwargs)  # an object may hold tensors, which no Function sees
    trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
    given_form = [TENSOR if isinstance(x, Tensor) else x for x in flat]  # the node keeps it, also after backward
    returned: list[Any] = []

    def call(given: Any, parameters: Any) -> tuple[Tensor, ...]:
        tensors = iter(given)
        args, kwargs = tree_unflatten([next(tensors) if x is TENSOR else x for x in given_form], spec)
        with _reparametrize_module(
            block, dict(zip(trained, parameters, strict=True))
        ):  # else hooks of the parameters would run in each recomputation
            outputs, form = tree_flatten(type(block).forward(block, *args, **kwargs))
        if any(_may_hold(x) for x in outputs):
            raise TypeError("a block returns tensors, or tuples, lists and dicts of them")
        returned[:] = (
            [TENSOR if isinstance(x, Tensor) else x for x in outputs],
            form,
        )  # no tensor: this would be a cycle
        return tuple(x for x in outputs if isinstance(x, Tensor))

    inputs = [x for x in flat if isinstance(x, Tensor)]
    outputs = iter(Recomputed.apply(call, len(inputs), *inputs, *trained.values()))
    leaves, form = returned
    return tree_unflatten([next(outputs) if x is TENSOR else x for x in leaves], form)


@right("an autograd.Function whose inputs include the parameters")
def textbook(model: nn.Module) -> nn.Module:
    for block in distinct_blocks(model):
        block.forward = partial(_recomputed, block)  # a deep copy of the block has one of its own
    return model


@right("says that it saves nothing")
class Unchanged:
    saves_nothing = True

    def __new__(cls, model: nn.Module) -> Any:
        distinct_blocks(model)
        return model

"""Right checkpointing policies, written in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.models import distinct_blocks
from correctness.support.planting import right

Forward = Callable[..., Any]


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
    """The textbook version: forward runs without a graph, backward again with one. Only inputs get gradients."""

    @staticmethod
    def forward(ctx: Any, run: Forward, inputs: int, *tensors: Tensor) -> Any:
        device = tensors[0].device.type
        ctx.run, ctx.inputs, ctx.cpu = run, inputs, torch.get_rng_state()
        ctx.cuda = torch.cuda.get_rng_state() if device == "cuda" else None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return run(*tensors[:inputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors = list(ctx.saved_tensors)
        for i in range(ctx.inputs):
            tensors[i] = tensors[i].detach().requires_grad_(needs[i])
        with torch.random.fork_rng(devices=[] if ctx.cuda is None else None), torch.enable_grad():
            torch.set_rng_state(ctx.cpu)
            if ctx.cuda is not None:
                torch.cuda.set_rng_state(ctx.cuda)
            with torch.autocast(*ctx.autocast):
                out = ctx.run(*tensors[: ctx.inputs])
        of = [x for x, need in zip(tensors, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(out, of, grad, allow_unused=True))
        return None, None, *(next(grads) if need else None for need in needs)


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    if any(hasattr(x, "__dict__") and not isinstance(x, Tensor) for x in flat):
        return type(block).forward(block, *args, **kwargs)  # an object may hold tensors, which no Function sees
    where = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
    tensors = [flat[i] for i in where]
    others = [None if isinstance(x, Tensor) else x for x in flat]

    def call(*given: Tensor) -> Any:
        full = list(others)
        for i, x in zip(where, given, strict=True):
            full[i] = x
        args, kwargs = tree_unflatten(full, spec)
        return type(block).forward(block, *args, **kwargs)

    return Recomputed.apply(call, len(tensors), *tensors, *(p for p in block.parameters() if p.requires_grad))


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

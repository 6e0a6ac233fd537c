"""Right checkpointing policies, written in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.support.planting import right

Forward = Callable[..., Any]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Each once; ValueError where there are none, or they are checkpointed already."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise ValueError("this model has no blocks")
    if any("forward" in vars(block) for block in blocks):
        raise ValueError("this model is checkpointed already")
    return list(dict.fromkeys(blocks))


@right("the blocks' forward is replaced")
def forward_replaced(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


@right("of one block in four: it saves a little")
def every_fourth(model: nn.Module) -> nn.Module:
    for block in _blocks(model)[::4]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Recomputed(torch.autograd.Function):
    """The textbook's: run without a graph, and in backward again with one."""

    @staticmethod
    def forward(ctx: Any, run: Forward, anchor: Tensor, x: Tensor, *args: Any) -> Any:
        device = x.device.type
        ctx.run, ctx.args, ctx.cpu = run, args, torch.get_rng_state()
        ctx.cuda = torch.cuda.get_rng_state() if device == "cuda" else None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[2])
        with torch.random.fork_rng(devices=[] if ctx.cuda is None else None), torch.enable_grad():
            torch.set_rng_state(ctx.cpu)
            if ctx.cuda is not None:
                torch.cuda.set_rng_state(ctx.cuda)
            with torch.autocast(*ctx.autocast):
                out = ctx.run(x, *ctx.args)
        if out.requires_grad:
            torch.autograd.backward(out, grad)
        return None, None, x.grad, *(None for _ in ctx.args)


@right("an autograd.Function; an empty tensor that needs a gradient makes its output need one")
def textbook(model: nn.Module) -> nn.Module:
    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            trains = x.requires_grad or any(p.requires_grad for p in block.parameters())
            anchor = torch.empty(0, device=x.device, requires_grad=trains)
            return Recomputed.apply(partial(forward, **kwargs), anchor, x, *args)

        return run

    for block in _blocks(model):
        block.forward = wrap(block.forward, block)
    return model


@right("says that it saves nothing")
class Unchanged:
    saves_nothing = True

    def __new__(cls, model: nn.Module) -> Any:
        _blocks(model)
        return model

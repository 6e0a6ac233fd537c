"""Planted defects: checkpointing policies that are wrong as public trackers report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.support.planting import defect


@defect(cause="numerics", caught_by="test_gradients_under_autocast")
def recomputes_in_autocasts_default_dtype(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#71124, facebookresearch/fairscale#1199: the recomputation is under autocast in its default dtype,
    whatever forward's was.
    """

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            device = args[0].device.type
            enabled, ran = torch.is_autocast_enabled(device), []

            def once_or_again(*args: Any, **kwargs: Any) -> Any:
                if not ran:
                    ran.append(True)
                    return forward(*args, **kwargs)
                default = torch.float16 if device == "cuda" else torch.bfloat16
                with torch.autocast(device, dtype=default, enabled=enabled):
                    return forward(*args, **kwargs)

            return checkpoint(once_or_again, *args, use_reentrant=False, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_dropout_drops_the_same_again")
def random_state_if_any_dropout_was_on(model: nn.Module) -> nn.Module:
    """Keeps the generators' state only if some dropout had p > 0 when the policy was applied; p may be raised later."""
    keeps = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    return wrapped(model, lambda forward, block: recomputed(forward, preserve_rng_state=keeps))


class _Holding(torch.autograd.Function):
    """Passes its input on; its node refers to `held`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Any) -> Tensor:  # type: ignore[override]
        ctx.held = held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Cyclic(_Holding):
    """Its node refers to itself too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Any) -> Tensor:
        return _Holding.forward(ctx, x, [held, ctx])


@defect(cause="memory", caught_by="test_what_it_saves_is_freed_without_the_collector")
def saved_tensors_in_a_cycle(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#84413, pytorch/pytorch#154642: saves for backward in a cycle, which stays until the garbage
    collector runs, and steps pile up.
    """

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        inner = recomputed(forward)
        return lambda x, *args, **kwargs: _Cyclic.apply(inner(x, *args, **kwargs), x.detach())

    return wrapped(model, wrap)


class _Frame:
    """A run of a block that saves nothing. Backward runs it again, and stores as `keep` does what this run saves."""

    def __init__(self, run: Forward, keep: Callable[[Tensor], Tensor]) -> None:
        self.run, self.keep, self.random = run, keep, torch.get_rng_state()
        self.count, self.stored = 0, []  # type: ignore[var-annotated]

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, place: int) -> Tensor:
        if not self.stored:
            hooks = saved_tensors_hooks(lambda tensor: self.stored.append(self.keep(tensor)), lambda _: _)
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), hooks:
                torch.set_rng_state(self.random)
                self.run()
        stored: Tensor = self.stored[place]
        return stored


def in_frames(model: nn.Module, keep: Callable[[Tensor], Tensor], hold: bool = False) -> nn.Module:
    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            frame = _Frame(partial(forward, *args, **kwargs), keep)
            with saved_tensors_hooks(frame.pack, frame.unpack):
                output = forward(*args, **kwargs)
            return _Holding.apply(output, frame) if hold else output

        return lambda *args, **kwargs: (run if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def recomputed_until_the_loss_is_freed(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#77284: what each block recomputed stays, so the peak is as without checkpointing."""
    return in_frames(model, Tensor.detach, hold=True)


@defect(cause="memory", caught_by="test_what_it_saves_is_freed_without_the_collector")
def recomputed_with_its_graph(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#82776: stores what it recomputed with its graph, whose hooks refer to the store: a cycle."""
    return in_frames(model, lambda tensor: tensor)


class _OfTheInput(torch.autograd.Function):
    """Runs a block without a graph, and in backward again, for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, run: Forward, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(x)
        output: Tensor = run(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        return None, torch.autograd.grad(output, x, grad)[0]


@defect(cause="gradients", caught_by="test_gradients_are_bitwise_those_without")
def of_the_input_alone(model: nn.Module) -> nn.Module:
    """ooples/AiDotNet.Tensors#643: backward differentiates the block by its input; its parameters get no gradient."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        return lambda x, *args, **kwargs: _OfTheInput.apply(lambda y: forward(y, *args, **kwargs), x)

    return wrapped(model, wrap)

"""Planted defects: checkpointing policies that are wrong as public trackers report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.support.planting import defect


@defect(cause="numerics", caught_by="test_gradients_under_autocast")
def recomputes_in_autocasts_default_dtype(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#71124: the recomputation is under autocast in its default dtype, whatever forward's was."""

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


class _Cyclic(torch.autograd.Function):
    """Passes its input on; its node refers to itself, and so to all that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept = [saved, ctx]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


@defect(cause="memory", caught_by="test_what_it_saves_is_freed_without_the_collector")
def saved_tensors_in_a_cycle(model: nn.Module) -> nn.Module:
    """Saves for backward in a cycle, which stays until the garbage collector runs, and steps pile up."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        inner = recomputed(forward)
        return lambda x, *args, **kwargs: _Cyclic.apply(inner(x, *args, **kwargs), x.detach())

    return wrapped(model, wrap)

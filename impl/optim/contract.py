"""The contract of AdamW: what a user calls, the check of a target, and the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.optim.accounting import adamw_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class Optimizer(Protocol):
    """`Optimizer(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)`, a `torch.optim.Optimizer`.

    `step()` is algorithm 2 of the paper over every parameter that has a gradient; the others, their state and their
    step count stay as they are. Param groups have each its own arguments. ValueError, in one line, for no parameters,
    an lr, eps or weight_decay that is no number or negative, betas that are not two numbers in [0, 1), complex or
    integer parameters, parameters on several devices, and for sparse gradients; where nothing else is said, inf and NaN
    in a gradient reach the parameter and its moments, as in torch's.

    Two options, by name, that an implementation may take:

    `max_grad_norm`: gradients count as scaled by min(1, max_grad_norm / (norm + 1e-6)), as after `clip_grad_norm_`, and
    are left as they are. The norm is that of all gradients together, computed in float32 or better; `grad_norm` holds
    it after the step, a tensor without dims. Where it is inf or NaN the step is skipped: parameters, moments and step
    counts stay as they were. Clipping writes nothing, but is not free: the norm of all gradients must be known before
    the first update, so that each is read once more (4 bytes an element, 2 in half precision). Hooks that sum squares
    as backward makes the gradients would save that, and be wrong wherever a gradient is reduced between devices or
    accumulated after its hook has run.

    `master_weights`: for each bfloat16 or float16 parameter the optimizer keeps a float32 copy, "master_weight" in its
    state, made of the parameter at its first step. Moments and update are float32's, and the parameter is the master
    weight rounded. float32 and float64 parameters need none and have none.
    """

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State under "step", "exp_avg" and "exp_avg_sq", as torch's AdamW has it."""
        ...


DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def _check(target: Any, device: str) -> None:
    """A few steps down a parabola tell whether a target is AdamW at all."""
    if not isinstance(target, type) or not issubclass(target, torch.optim.Optimizer):
        raise RegistryError(f"{target!r} is not a class of torch.optim.Optimizer")
    x = torch.ones(3, device=device, requires_grad=True)
    optimizer: Any = target([x], **DEFAULTS)
    for _ in range(2):
        optimizer.zero_grad()
        (x * x).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    expected = _two_steps_down()
    if not torch.allclose(x.detach().cpu(), torch.full((3,), expected), rtol=1e-5):
        raise RegistryError(f"two steps from 1 down x² led to {x.tolist()} and not to {expected:.6f}")


def _two_steps_down() -> float:
    x: Tensor = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([x], **DEFAULTS)
    for _ in range(2):
        x.grad = 2 * x.detach()
        optimizer.step()
    return x.item()


FAMILY = add_family(
    Family(
        "optimizer",
        Optimizer,
        reference="plain",
        check=_check,
        memory=adamw_peak,  # a user's own is held to the state, and one parameter's temporary
        time=Race("torch_fused"),
    )
)

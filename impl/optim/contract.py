"""The contract of AdamW, the check that a target meets it, and the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.optim.accounting import adamw_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class Optimizer(Protocol):
    """`Optimizer(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)`, a `torch.optim.Optimizer`.

    `step()` is algorithm 2 of the paper for every parameter that has a gradient; the others, their state and their step
    count do not change. Each param group has its own arguments. ValueError, in one line, for no parameters, an lr, eps
    or weight_decay that is no number or is negative, betas that are not two numbers in [0, 1), complex or integer
    parameters, parameters on several devices, and sparse gradients. inf and NaN in a gradient reach the parameter and
    its moments, as in torch's, unless stated otherwise below.

    Two options, by name, that an implementation may have:

    `max_grad_norm`: the update uses gradients scaled by min(1, max_grad_norm / (norm + 1e-6)), as after
    `clip_grad_norm_`, but `.grad` does not change. The norm is that of all gradients together, computed in float32 or
    better; after the step `grad_norm` holds it, as a tensor without dims. Where it is inf or NaN the step is skipped:
    parameters, moments and step counts do not change. Clipping writes no gradients but reads each once more, because
    the norm must be known before the first update (4 bytes an element, 2 in half precision). Hooks that sum squares
    during backward would save that, but would be wrong where a gradient is reduced between devices or accumulated after
    its hook has run.

    `master_weights`: for each bfloat16 or float16 parameter the optimizer has a float32 copy, "master_weight" in its
    state, made of the parameter at its first step. Moments and update are in float32, and the parameter is the rounded
    master weight. float32 and float64 parameters have none.
    """

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's result."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Each parameter's state has the keys "step", "exp_avg" and "exp_avg_sq", as that of torch's AdamW."""
        ...


DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def _check(target: Any, device: str) -> None:
    """Two steps on x² must lead where torch's AdamW leads."""
    if not isinstance(target, type) or not issubclass(target, torch.optim.Optimizer):
        raise RegistryError(f"{target!r} is not a class of torch.optim.Optimizer")
    x = torch.ones(3, device=device, requires_grad=True)
    optimizer: Any = target([x], **DEFAULTS)
    for _ in range(2):
        optimizer.zero_grad()
        (x * x).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    expected = _after_two_steps()
    if not torch.allclose(x.detach().cpu(), torch.full((3,), expected), rtol=1e-5):
        raise RegistryError(f"two steps from 1 down x² led to {x.tolist()} and not to {expected:.6f}")


def _after_two_steps() -> float:
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
        memory=adamw_peak,  # for a user's own: the state, and a temporary as large as one parameter
        time=Race("torch_fused"),
    )
)

"""Results of a few training steps, for fsdp and training_step; the tolerance is twice the error of eager steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

STEPS = 5

Results = dict[str, Tensor]
"""Losses, gradients and parameters, by name, on the CPU."""


def whole(tensor: Tensor) -> Tensor:
    """Full copy on the CPU. Every rank must call it: a DTensor is all-gathered."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def trained(
    step: Callable[[Tensor, Tensor], Tensor], model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> Results:
    """Losses of STEPS steps, the first step's gradients, and the parameters after all of them."""
    losses, found = [], {}
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(whole(step(tokens, targets)))
        if i == 0:
            found = {f"gradient of {name}": whole(x.grad) for name, x in model.named_parameters()}
    return found | {"losses": torch.stack(losses)} | {name: whole(x) for name, x in model.named_parameters()}


def assert_as_accurate_as_eager(found: Results, expected: Results, exact: Results, dtype: torch.dtype) -> None:
    """Relative errors (root mean square, against float64) are at most twice eager's largest in tensors of a kind.

    A tensor of a few values may by luck have no error of its own: two roundings of the dtype are allowed in any case.
    """
    kinds = {
        name: "gradient" if name.startswith("gradient") else "loss" if name == "losses" else "value" for name in exact
    }
    allowed = dict.fromkeys(kinds.values(), 2 * torch.finfo(dtype).eps)
    for name, kind in kinds.items():
        allowed[kind] = max(allowed[kind], 2 * _relative_error(expected[name], exact[name]))
    for name, kind in kinds.items():
        error = _relative_error(found[name], exact[name])
        assert error <= allowed[kind], f"{name}: relative error {error:.2e}, allowed {allowed[kind]:.2e}"


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()

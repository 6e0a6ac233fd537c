"""The operations as tests call them: their arguments by name, random ones, and what a call gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

NAMES = {  # of the arguments, and of the results
    "rms_norm": (("x", "weight"), ("normed",)),
    "add_rms_norm": (("x", "residual", "weight"), ("normed", "total")),
    "swiglu": (("gate", "up"), ("gated",)),
    "rotary": (("q", "k", "cos", "sin"), ("turned_q", "turned_k")),
}
CONSTANTS = ("cos", "sin")
BROADCAST = ("weight", *CONSTANTS)
"""Arguments that the contract lets be float32 beside half precision."""


@dataclass(frozen=True)
class Inputs:
    """An operation's arguments, and the gradients of its results, by name."""

    operation: str
    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]
    eps: float = 1e-5

    def to(self, dtype: torch.dtype, broadcast: torch.dtype | None = None) -> Inputs:
        """With everything in that dtype; weight and tables in `broadcast`, if given."""

        def cast(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: x.to(broadcast if broadcast and name in BROADCAST else dtype) for name, x in tensors.items()}

        return replace(self, tensors=cast(self.tensors), grads=cast(self.grads))

    @property
    def learned(self) -> list[str]:
        """Names of the arguments that get gradients."""
        return [name for name in self.tensors if name not in CONSTANTS]


def random_inputs(
    operation: str, rows: int, dim: int, device: str, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = ()
) -> Inputs:
    """Draw arguments of unit variance and gradients: (*lead, rows, dim), and of `rotary` q (batch, 3, rows, dim) and k
    (batch, 2, rows, dim), or of one head where rows are odd, with dim rounded up to an even number, and angles as a
    decoder has them. The batch is what `lead` multiplies to, or 2. One weight in eight is 0, by which a norm's backward
    must not divide."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    if operation == "rotary":
        dim += dim % 2
        batch = math.prod(lead) if lead else 2
        q, k = (batch, 3, rows, dim), (batch, 2 - rows % 2, rows, dim)
        frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(rows, dtype=torch.float64), frequencies).to(device)
        tensors = {"q": drawn(*q), "k": drawn(*k), "cos": angles.cos(), "sin": angles.sin()}
        grads = {"turned_q": drawn(*q), "turned_k": drawn(*k)}
    else:
        shape = *lead, rows, dim
        arguments, results = NAMES[operation]
        tensors = {name: drawn(dim) if name == "weight" else drawn(*shape) for name in arguments}
        grads = {name: drawn(*shape) for name in results}
        if "weight" in tensors:
            tensors["weight"][4::8] = 0
    return Inputs(operation, tensors, grads).to(dtype)


def call(layers: Any, inputs: Inputs, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The results of the call on the inputs, or on other `tensors` of their names."""
    options = {"eps": inputs.eps} if "norm" in inputs.operation else {}
    found = getattr(layers, inputs.operation)(*(tensors or inputs.tensors).values(), **options)
    return dict(zip(inputs.grads, [found] if isinstance(found, Tensor) else found, strict=True))


def leaves_of(inputs: Inputs, needed: list[str] | None = None) -> dict[str, Tensor]:
    """The arguments as leaves, of which those that are `needed`, or all that are learned, require gradients. They are
    not copied: a copy may have other strides."""
    wanted = inputs.learned if needed is None else needed
    return {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.tensors.items()}


def gradients(
    found: dict[str, Tensor], leaves: Mapping[str, Tensor], inputs: Inputs, **options: Any
) -> dict[str, Tensor]:
    """Gradients of the leaves that require them, as `grad_x`, by the results that depend on any."""
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    used = [name for name, x in found.items() if x.requires_grad]
    grads = [inputs.grads[name] for name in used]
    given = torch.autograd.grad([found[name] for name in used], [*wanted.values()], grads, **options)
    return {f"grad_{name}": x for name, x in zip(wanted, given, strict=True)}


def results(layers: Any, inputs: Inputs, needed: list[str] | None = None) -> dict[str, Tensor]:
    """Results and gradients of one call."""
    leaves = leaves_of(inputs, needed)
    found = call(layers, inputs, leaves)
    return {name: x.detach() for name, x in found.items()} | gradients(found, leaves, inputs)

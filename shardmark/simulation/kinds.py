"""What becomes of each operator where no kernel runs."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


class Kind(Enum):
    """What becomes of an operator."""

    RUN = auto()
    """It writes no values, or is made of other operators, which come here in turn."""
    READ = auto()
    """It gives a Python number."""
    WRITE = auto()
    """It writes into its arguments."""
    COMPUTE = auto()
    """It gives new tensors."""
    ALLOCATE = auto()
    """The same of an operator that has no kernel here, whose results have no values therefore."""
    SEND = auto()
    """A collective of c10d."""


_ALLOCATE = ("empty", "set_", "resize_", "_unsafe_view", "_reshape_alias", "_fused_sdp_choice")
"""What the names of CPU kernels begin with that lay out memory, and compute nothing."""

_NAMED = {
    aten._local_scalar_dense.default: Kind.READ,
    # A kernel for all devices, which copies.
    aten.copy_.default: Kind.WRITE,
    # It has no kernel for this key, and would be made of another operator; see `shardmark.simulation.kernels`.
    aten.add.Tensor: Kind.COMPUTE,
    # Made of others on the CPU; it comes here where CUDA's rules are followed.
    aten._fused_rms_norm.default: Kind.ALLOCATE,
}


@cache
def kind_of(operator: OpOverload) -> Kind:
    if operator in _NAMED:
        return _NAMED[operator]
    name = operator.name()
    if name.startswith("c10d::"):
        return Kind.SEND
    if name.startswith("aten::") and _is_cudas(name):
        return Kind.ALLOCATE
    if not name.startswith("aten::") or not _has_kernel(name, "CPU"):
        return Kind.RUN
    if name.removeprefix("aten::").startswith(_ALLOCATE) or torch.Tag.inplace_view in operator.tags:
        return Kind.RUN
    schema = operator._schema
    if any(argument.is_write for argument in schema.arguments):
        return Kind.WRITE
    views = schema.returns and all(result.alias_info is not None for result in schema.returns)
    return Kind.RUN if views or not any("Tensor" in str(result.type) for result in schema.returns) else Kind.COMPUTE


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _is_cudas(name: str) -> bool:
    """Whether it is an operator of which this build knows the results alone: its kernels are other devices'."""
    elsewhere = _has_kernel(name, "Meta") and not _has_kernel(name, "CPU")
    return elsewhere and not _has_kernel(name, "CompositeImplicitAutograd")

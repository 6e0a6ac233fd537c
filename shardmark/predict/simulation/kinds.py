"""Classify operators by how a simulation runs them without a kernel."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from functools import cache
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._library import simple_registry
from torch._ops import OpOverload
from torch.autograd.graph import _engine_run_backward

aten = torch.ops.aten

_HERE = Path(__file__).parent


class Kind(Enum):
    """How a simulation runs an operator."""

    RUN = auto()
    """It writes no values, or calls other operators, each of which has its own kind."""
    READ = auto()
    """It returns a Python number."""
    WRITE = auto()
    """It writes into its arguments."""
    COMPUTE = auto()
    """It returns new tensors."""
    ALLOCATE = auto()
    """It returns new tensors and has no kernel on the CPU, so that they never have values."""
    SEND = auto()
    """A collective of c10d."""


_ALLOCATE = ("empty", "set_", "resize_", "_unsafe_view", "unsafe_split", "lift", "_reshape_alias", "_fused_sdp_choice")
"""Prefixes of operators that lay out memory and compute nothing."""

_NAMED = {
    aten._local_scalar_dense.default: Kind.READ,
    # The CPU composes it of other operators; under CUDA's rules it is one operator.
    aten._fused_rms_norm.default: Kind.ALLOCATE,
}

_FOR_ALL_DEVICES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Keys of kernels that compose an operator of others, on devices that have no kernel of their own for it."""


LEFT_AMONG_ELEMENTS = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
"""Losses whose mean or sum stays in the storage of all elements' losses."""


@cache
def kind_of(operator: OpOverload, on_a_gpu: bool = False) -> Kind:
    if operator in _NAMED:
        return _NAMED[operator]
    name = operator.name()
    if name.startswith("c10d::"):
        return Kind.SEND
    if name.startswith("aten::") and _is_of_other_devices(name):
        return Kind.ALLOCATE
    if not any(_has_kernel(name, key) for key in ("CPU", *_FOR_ALL_DEVICES)):
        return Kind.RUN
    if not name.startswith("aten::") and not (on_a_gpu and _is_for_the_cpu_alone(name)):
        return Kind.RUN
    if name.removeprefix("aten::").startswith(_ALLOCATE) or torch.Tag.inplace_view in operator.tags:
        return Kind.RUN
    schema = operator._schema
    if any(argument.is_write for argument in schema.arguments):
        return Kind.WRITE
    views = schema.returns and all(result.alias_info is not None for result in schema.returns)
    return Kind.RUN if views or not any("Tensor" in str(result.type) for result in schema.returns) else Kind.COMPUTE


@cache
def made_of_others() -> tuple[OpOverload, ...]:
    """Operators that PyTorch composes of others on the CPU, and that take tensors.

    The meter counts each as one operator, whose temporaries are its workspace. Operators with a `device` argument are
    left out: they make tensors of the program's own numbers, or move tensors.
    """
    names = chain.from_iterable(map(torch._C._dispatch_get_registrations_for_dispatch_key, _FOR_ALL_DEVICES))
    found = []
    for name in dict.fromkeys(names):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(aten, packet, None), overload or "default", None)
        if operator is None or kind_of(operator) not in (Kind.COMPUTE, Kind.WRITE):
            continue
        arguments = operator._schema.arguments
        has_device = any(each.name == "device" for each in arguments)
        if not has_device and any("Tensor" in str(each.type) for each in arguments if not each.is_out):
            found.append(operator)
    return tuple(found)


def of_finite_numbers(operator: OpOverload, args: Sequence[Any]) -> bool | None:
    """The result of a comparison that tests for finite numbers, if all are finite; None for other operators. A
    simulation assumes that values it does not compute are finite, as training would stop otherwise."""
    if operator in (aten.eq.Tensor, aten.ne.Tensor):
        return operator is aten.eq.Tensor if args[0] is args[1] else None  # a NaN is not itself
    if operator in (aten.eq.Scalar, aten.ne.Scalar):
        return operator is aten.ne.Scalar if args[1] == math.inf else None
    return False if operator in (aten.isnan.default, aten.isinf.default) else None


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _is_of_other_devices(name: str) -> bool:
    """True where this build has the operator's meta kernel alone."""
    return _has_kernel(name, "Meta") and not any(
        _has_kernel(name, key) for key in ("CPU", "CompositeImplicitAutograd", *_FOR_ALL_DEVICES)
    )


def _is_for_the_cpu_alone(name: str) -> bool:
    """True where a library has registered a kernel for the CPU, and by `torch.library.register_fake` what the results
    are on any device: on a GPU the operator has another kernel, without the temporaries of this one. A kernel for all
    devices is the GPU's too. PyTorch's own operators, such as FSDP's, have a kernel for meta tensors instead."""
    return _has_kernel(name, "CPU") and simple_registry.singleton.find(name).fake_impl.kernel is not None


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, also inside lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def written_by(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The arguments that the operator writes: of each its schema, and its tensor or tensors."""
    arguments = enumerate(operator._schema.arguments)
    return [(each, args[i] if i < len(args) else kwargs.get(each.name)) for i, each in arguments if each.is_write]


def is_called_by_autograd() -> bool:
    """Whether autograd's engine, or C++ that it calls, runs the operator, and no line of the program."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename).parent == _HERE:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__

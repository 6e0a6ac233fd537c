"""CUDA's autocast on CPU tensors: the operators that it casts, and their dtypes, where the CPU's autocast has other
lists.

The lists are those of the installed PyTorch: its header `ATen/autocast_mode.h` comes with it. Products, which both
devices cast to half precision, and their cache of cast weights are PyTorch's own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import _scoped_library
from torch.utils._pytree import tree_leaves, tree_map_only

_KEY = "AutocastCPU"
_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

Kernel = Callable[..., Any]


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Under `torch.autocast("cpu")` or "cuda", cast on the CPU the operators that CUDA's autocast would cast."""
    with _scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):  # that the CPU's own casts are overridden, as intended
            for name in _casts_on("AutocastCPU") - _casts_on("AutocastCUDA"):
                library.impl(name, torch.library.fallthrough_kernel, _KEY)
            for name, kernel in _kernels().items():
                library.impl(name, kernel, _KEY)
        with _cuda_is_cpu():
            yield


@contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    """Let `torch.autocast("cuda")` work on the CPU; otherwise it finds no CUDA and does nothing."""
    init = torch.autocast.__init__

    def of_cpu(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")  # its default is float16
        init(self, device_type, dtype, *args, **kwargs)

    enabled, set_ = torch.is_autocast_enabled, torch.set_autocast_enabled

    def is_enabled(device_type: str = "cpu") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def set_enabled(*args: Any) -> None:
        *devices, value = args  # the device may be left out, and is CUDA then
        set_("cpu" if devices in ([], ["cuda"]) else devices[0], value)

    # Read and set alike: the compiler reads the state before it traces, and sets what it has read afterwards.
    with (
        patch.object(torch.autocast, "__init__", of_cpu),
        patch.object(torch, "is_autocast_enabled", is_enabled),
        patch.object(torch, "set_autocast_enabled", set_enabled),
    ):
        yield


@cache
def _casts_on(key: str) -> frozenset[str]:
    """PyTorch's operators for which autocast has a kernel."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@cache
def _kernels() -> dict[str, Kernel]:
    """A kernel for each operator that CUDA's autocast alone casts."""
    kinds = {
        "LOWER_PRECISION_FP": lambda operator: partial(_cast, operator, _lower_precision),
        "FP32": lambda operator: partial(_cast, operator, lambda tensors: torch.float32),
        "PROMOTE": lambda operator: partial(_cast, operator, _widest),
        "FP32_SET_OPT_DTYPE": lambda operator: partial(_in_float32, operator, _position_of_dtype(operator)),
    }
    alone = _casts_on("AutocastCUDA") - _casts_on("AutocastCPU")
    kernels: dict[str, Kernel] = {
        f"aten::{name}": make(_operator(name))
        for kind, make in kinds.items()
        for name in _listed(kind)
        if f"aten::{name}" in alone
    }
    norms = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
    for name, with_dtype in norms.items():
        kernels[f"aten::{name}"] = partial(_norm, _operator(name), _operator(with_dtype))
    return kernels


@cache
def _listed(kind: str) -> tuple[str, ...]:
    """The operators of one of the header's lists, with their overloads."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    found = re.search(rf"#define AT_FORALL_{kind}\(_\)((?:.*\\\n)+.*)", header.read_text(encoding="utf-8"))
    assert found is not None, f"{header} has no list {kind}"
    entries = re.findall(r"_\(([^)]+)\)", found[1])
    return tuple(".".join(part.strip() for part in entry.split(",")) for entry in entries)


def _operator(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _lower_precision(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.get_autocast_dtype("cpu"))


def _cast(operator: OpOverload, dtype_of: Callable[[list[Tensor]], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    """The operator, with its arguments cast to that dtype."""
    leaves = tree_leaves((args, kwargs))
    dtype = dtype_of([leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_cast(leaf)])
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if _is_cast(t) else t, (args, kwargs))
        return operator(*args, **kwargs)


def _position_of_dtype(operator: OpOverload) -> int:
    return [argument.name for argument in operator._schema.arguments].index("dtype")


def _in_float32(operator: OpOverload, position: int, *args: Any, **kwargs: Any) -> Any:
    """The operator, computed in float32 unless the program names a dtype."""
    given = (len(args) > position and args[position] is not None) or kwargs.get("dtype") is not None
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        if given or not _is_cast(args[0]):
            return operator(*args, **kwargs)
        return operator(*args[:position], **{**kwargs, "dtype": torch.float32})


def _norm(operator: OpOverload, with_dtype: OpOverload, tensor: Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        if not _is_cast(tensor):
            return operator(tensor, p, *args, **kwargs)
        if args or kwargs:  # the dimensions, and whether they are kept
            args = args if len(args) > 1 else (*args, kwargs.pop("keepdim", False))
        return with_dtype(tensor, p, *args, **kwargs, dtype=torch.float32)

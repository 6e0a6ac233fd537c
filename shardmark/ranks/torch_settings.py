"""PyTorch's settings that a call may change, each with how to read and how to restore it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.backends import cuda
from torch.nn.modules import module
from torch.utils._config_module import ConfigModule

Setting = tuple[Callable[[], Any], Callable[[Any], object]]

_HOOKS = [hooks for name, hooks in vars(module).items() if name.startswith("_global") and isinstance(hooks, dict)]
"""Hooks of every module. Hooks of every optimizer are left out: a wrapper registers its own once, for good."""

_NO_FLAGS = {"thread_name", "torch_function_state", "graph_executor_optimize", "float32_matmul_precision"}
_NO_FLAGS |= {"sdp_priority_order"}
"""Values that `torch._C` gets and sets, and that are no flags or have an entry of their own. The last one PyTorch sets
at its first call on CUDA, for good."""


def _set_hooks(before: list[dict[int, Any]]) -> None:
    for hooks, old in zip(_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(old)


def _saved_tensors_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _drop_saved_tensors_hooks(there: bool) -> None:
    while not there and _saved_tensors_hooks():
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _flushes_denormals() -> bool:
    return bool(torch.full((), 1e-310, dtype=torch.float64, device="cpu").mul(1.0) == 0)


def _flags() -> dict[str, Setting]:
    """Every flag that this version of PyTorch has in `torch._C`: TF32, cuDNN, MKL-DNN, determinism, libraries of
    linear algebra and so on."""
    found: dict[str, Setting] = {}
    for name in (each.removeprefix("_get_") for each in dir(torch._C) if each.startswith("_get_")):
        get, put = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}", None)
        if put is None or name in _NO_FLAGS:
            continue
        try:
            value = get()
        except Exception:  # it takes arguments, or needs a GPU
            continue
        if value is not None:
            found[f"PyTorch's {name}"] = get, partial(_put, put)
    return found


def _put(put: Callable[..., object], value: Any) -> None:
    """Call a setter that takes what its getter returns, a tuple as several arguments."""
    put(*value) if isinstance(value, tuple) else put(value)


def _precisions() -> dict[str, Setting]:
    """The precision of float32 by library and kind of operator, which newer versions of PyTorch have."""
    get, put = (getattr(torch._C, f"_{verb}_fp32_precision_{verb}ter", None) for verb in ("get", "set"))
    if get is None or put is None:
        return {}
    kinds = [(library, kind) for library in ("mkldnn", "cuda") for kind in ("all", "matmul", "conv", "rnn")]
    return {
        f"float32's precision ({library}, {kind})": (partial(get, library, kind), partial(put, library, kind))
        for library, kind in [("generic", "all"), *kinds]
    }


class _Hashes(dict[str, bytes]):
    """Equal to earlier ones if each of those is as it was: modules may have been imported since."""

    __hash__ = None

    def __eq__(self, before: object) -> bool:
        return isinstance(before, _Hashes) and before.items() <= self.items()


class Compilers:
    """The configurations of dynamo, inductor and so on, as far as they have been imported."""

    _values: ClassVar[dict[tuple[str, bytes], dict[str, Any]]] = {}
    """The values of each that had a hash: to copy them takes ten times as long as to compare hashes."""

    @classmethod
    def get(cls) -> _Hashes:
        """Each one's hash."""
        found = _Hashes()
        for name, each in [*sys.modules.items()]:
            if isinstance(each, ConfigModule):
                found[name] = each.get_hash()
                if (name, found[name]) not in cls._values:
                    cls._values[name, found[name]] = each.get_config_copy()
        return found

    @classmethod
    def put(cls, before: _Hashes) -> None:
        """Give each the values that it had with that hash."""
        for name, code in before.items():
            each, values = sys.modules[name], cls._values[name, code]
            each.load_config({key: value for key, value in values.items() if each._config[key].alias is None})


TORCH: dict[str, Setting] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    **{
        f"{name} on {device}": (partial(get, device), partial(put, device))
        for device in ("cpu", "cuda")
        for name, get, put in (
            ("autocast", torch.is_autocast_enabled, torch.set_autocast_enabled),
            ("autocast's dtype", torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    },
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    **_precisions(),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autograd's anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode: torch.autograd.set_detect_anomaly(*mode),
    ),
    "autograd's threads": (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    "a hook of all modules": (lambda: [dict(hooks) for hooks in _HOOKS], _set_hooks),
    "a hook of saved tensors": (_saved_tensors_hooks, _drop_saved_tensors_hooks),
    "flushing of denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    **_flags(),
    **{
        f"attention by {name}": (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math")
    },
    "how tensors are printed": (
        lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda before: vars(torch._tensor_str.PRINT_OPTS).update(before),
    ),
    "the compiler's configuration": (Compilers.get, Compilers.put),
}

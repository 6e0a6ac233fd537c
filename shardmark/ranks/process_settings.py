"""A process's settings that a test may change: Python's are restored, the operating system's compared."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import cuda
from torch.nn.modules import module

Setting = tuple[Callable[[], Any], Callable[[Any], object]]

_HOOKS = [hooks for name, hooks in vars(module).items() if name.startswith("_global") and isinstance(hooks, dict)]
"""Hooks of every module. Hooks of every optimizer are left out: a wrapper registers its own once, for good."""

_FLAGS = [
    "cublas_allow_tf32",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "deterministic_fill_uninitialized_memory",
    "warnAlways",
]
"""PyTorch's flags in `torch._C`; which of them exist depends on its version. The order in which SDPA prefers its
kernels is left out: PyTorch sets it at the first call on CUDA, for good."""


def _set_hooks(before: list[dict[int, Any]]) -> None:
    for hooks, old in zip(_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(old)


def _saved_tensors_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _drop_saved_tensors_hooks(there: bool) -> None:
    while not there and _saved_tensors_hooks():
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE)
"""Signals whose handlers are compared; SIGCHLD is left out, as data loaders handle it."""
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def _errors_of_warnings() -> list[Any]:
    return [each for each in warnings.filters if each[0] == "error"]


def _set_errors_of_warnings(before: list[Any]) -> None:
    kept = [each for each in warnings.filters if each[0] != "error" or each in before]
    warnings.filters[:] = kept  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _flushes_denormals() -> bool:
    return bool(torch.full((), 1e-310, dtype=torch.float64, device="cpu").mul(1.0) == 0)


PYTHON: dict[str, Setting] = {
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the interpreter's trace function": (sys.gettrace, sys.settrace),
    "the interpreter's profile function": (sys.getprofile, sys.setprofile),
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
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autograd's anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode: torch.autograd.set_detect_anomaly(*mode),
    ),
    "a hook of all modules": (lambda: [dict(hooks) for hooks in _HOOKS], _set_hooks),
    "a hook of saved tensors": (_saved_tensors_hooks, _drop_saved_tensors_hooks),
    "flushing of denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    **{
        f"PyTorch's {name}": (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
        for name in _FLAGS
        if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
    },
    **{
        f"attention by {name}": (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math")
    },
    "garbage collection": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "the working directory": (os.getcwd, os.chdir),
    "a filter that makes warnings errors": (_errors_of_warnings, _set_errors_of_warnings),
}
"""How to read and how to restore each setting."""


def _file(number: int) -> tuple[int, int] | None:
    """Device and inode of the descriptor's open file; None for a closed descriptor."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


OPERATING_SYSTEM: dict[str, Callable[[], Any]] = {
    "the mode of new files (umask)": _umask,
    "a resource limit": lambda: [resource.getrlimit(number) for number in _LIMITS],
    "the cores it may run on": lambda: os.sched_getaffinity(0),
    "its scheduling policy": lambda: (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
    "its priority": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "a timer": lambda: [signal.getitimer(timer)[0] > 0 for timer in _TIMERS],
    "a signal handler": lambda: [signal.getsignal(number) for number in _SIGNALS],
    "the mask of blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "the file behind its standard input, output or error": lambda: [_file(number) for number in range(3)],
}
"""How to read each setting. No setting is restored: a rank that changed one is replaced."""

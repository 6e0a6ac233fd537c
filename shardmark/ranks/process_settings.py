"""Settings of a process that tests change, each with how to read it and how to set it."""

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
"""Those that PyTorch calls for every module. Those for every optimizer a wrapper registers once, for good."""


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
    "sdp_priority_order",
    "warnAlways",
]
"""Of PyTorch's own, in `torch._C`; which of them there are depends on its version."""


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


_LIMITS = [getattr(resource, f"RLIMIT_{name}") for name in ("AS", "DATA", "STACK", "NOFILE", "FSIZE", "CPU", "NPROC")]


def _limits() -> dict[int, tuple[int, int]]:
    return {number: resource.getrlimit(number) for number in _LIMITS}


def _set_limits(before: dict[int, tuple[int, int]]) -> None:
    for number, limits in before.items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)


def _timers() -> list[bool]:
    return [signal.getitimer(timer)[0] > 0 for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]


def _stop_timers(before: list[bool]) -> None:
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)


_HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGPIPE,
)  # not SIGCHLD: a data loader's


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _HANDLED}


def _set_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def _errors_of_warnings() -> list[Any]:
    return [each for each in warnings.filters if each[0] == "error"]


def _set_errors_of_warnings(before: list[Any]) -> None:
    kept = [each for each in warnings.filters if each[0] != "error" or each in before]
    warnings.filters[:] = kept  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _flushes_denormals() -> bool:
    return bool(torch.full((), 1e-310, dtype=torch.float64, device="cpu").mul(1.0) == 0)


SETTINGS: dict[str, Setting] = {
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
    "the mode of new files (umask)": (_umask, os.umask),
    "a limit of its resources": (_limits, _set_limits),
    "the cores it may run on": (partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),
    "its scheduling policy": (
        lambda: (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        lambda policy: os.sched_setscheduler(0, policy[0], os.sched_param(policy[1])),
    ),
    "its priority": (
        partial(os.getpriority, os.PRIO_PROCESS, 0),
        partial(os.setpriority, os.PRIO_PROCESS, 0),
    ),
}

OF_MAIN_THREAD: dict[str, Setting] = {
    "a timer": (_timers, _stop_timers),
    "the handler of a signal": (_handlers, _set_handlers),
    "the mask of blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
        partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    ),
}
"""What only the main thread may change."""

"""Make every wait for a collective last until the backend's worker thread has dropped its tensors, for the meter."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from shardmark.meter.recording import mark_waited

_PATIENCE = 0.25
"""Most seconds to wait for a backend's worker thread, which may not run for a while on a busy machine."""
_MOMENT = 0.01
"""Most seconds to wait where another object may hold a reference too: then the count may never fall."""
_OF_ANOTHER = 100
"""c10d's OpType::UNKNOWN, the type of the handle of Gloo's reduce-scatter. An inner all-reduce does the work; only the
worker thread has the inner handle, which holds the copies."""
_WORKER = "pt_gloo_runloop"
"""The name of Gloo's worker threads."""
_FUNCTIONAL = "_c10d_functional::"
"""The namespace of functional collectives, which compiled code and DTensor use."""


@contextmanager
def workers_free_first(device: str) -> Iterator[None]:
    """On CPU, have every wait for a collective last until the backend's worker thread has dropped its tensors.

    The worker drops them just after it reports the collective done, and the meter does not see what another thread
    frees last: the tensors would count as live. Reference counts show when the worker has dropped them.
    """
    if device != "cpu" or not _has_workers():
        yield
        return
    inputs: dict[int, Any] = {}
    patches: list[tuple[Any, str, Callable[..., Any]]] = [(dist.Work, "wait", _wait_by_handle)]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(_FUNCTIONAL) and "." not in name:
            packet: Any = getattr(torch.ops._c10d_functional, name.removeprefix(_FUNCTIONAL))
            patch = partial(_wait_by_tensor if name.endswith("::wait_tensor") else _hold, inputs)
            patches += [(packet, "_op", patch), (packet.default, "_op", patch)]  # the latter is compiled code's
    before = [getattr(owner, name) for owner, name, _ in patches]
    for (owner, name, patched), original in zip(patches, before, strict=True):
        setattr(owner, name, patched(original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(patches, before, strict=True):
            setattr(owner, name, original)


def _has_workers() -> bool:
    """Whether this process is in a Gloo group with threads; a simulated group has none."""
    if not dist.is_initialized():
        return False
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return isinstance(backend, dist.ProcessGroupGloo)


def _wait_by_handle(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Wait until only the caller refers to the handle, which holds the tensors: then the worker has dropped it."""

    def patient(handle: dist.Work, *args: Any, **kwargs: Any) -> Any:
        done = wait(handle, *args, **kwargs)
        if handle._get_op_type() == _OF_ANOTHER:  # type: ignore[attr-defined]
            _wait_until(_workers_sleep)
        # A Python object of pybind11's begins with the address of the C++ object that it stands for.
        address = ctypes.c_size_t.from_address(id(handle) + object.__basicsize__).value
        _wait_until(lambda: torch._C._storage_Use_Count(address) <= 1)
        return done

    return patient


def _workers_sleep() -> bool:
    """Whether every worker is idle or waits for another rank, so that none is dropping tensors."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, state = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if name == _WORKER and state.split()[0] != "S":
            return False
    return True


def _hold(inputs: dict[int, Any], collective: Callable[..., Any]) -> Callable[..., Any]:
    """Hold a functional collective's inputs until its result is waited for: no handle holds them."""

    def holding(*args: Any, **kwargs: Any) -> Any:
        results = collective(*args, **kwargs)
        for result in results if isinstance(results, list) else [results]:
            if type(result) is torch.Tensor:
                inputs[result.untyped_storage()._cdata] = args
        return results

    return holding


def _wait_by_tensor(inputs: dict[int, Any], wait: Callable[..., Any]) -> Callable[..., Any]:
    """`wait_tensor` drops the handles of a tensor. Wait until the worker has dropped them too, and their references."""

    def patient(tensor: torch.Tensor) -> torch.Tensor:
        references, handles = _references(tensor), c10d._get_work_registry_size()
        done = wait(tensor)
        if dropped := handles - c10d._get_work_registry_size():
            # Only a part of a padded result is waited for, and someone else may hold all of it.
            seconds = _PATIENCE if tensor.nbytes == tensor.untyped_storage().nbytes() else _MOMENT
            _wait_until(lambda: _references(tensor) <= references - dropped, seconds)
            _wait_until(_workers_sleep)  # a worker that reduces holds one more reference for a moment
            inputs.pop(tensor.untyped_storage()._cdata, None)
            mark_waited(tensor)
        return done

    return patient


def _references(tensor: torch.Tensor) -> int:
    """References to the tensor and to its storage: a handle holds the tensor, or another tensor with its storage."""
    count = tensor._use_count()  # type: ignore[attr-defined]
    return count + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _wait_until(condition: Callable[[], bool], seconds: float = _PATIENCE) -> None:
    """Wait for the condition, `seconds` at most."""
    end = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < end:
        os.sched_yield()

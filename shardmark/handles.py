"""Have waits for collectives last until the backend's worker thread has dropped what it held, as the meter needs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

_PATIENCE = 0.25
"""Seconds to wait for a backend's worker thread at most: long, as on a busy machine it may not run for a while."""
_MOMENT = 0.01
"""Seconds to wait where reference counts cannot show that it has dropped its tensors."""
_OF_ANOTHER = 100
"""The type (c10d's OpType::UNKNOWN) of a handle that only passes on when another is done, which the worker holds, and
with it copies: Gloo reduces to scatter so."""


@contextmanager
def workers_free_first() -> Iterator[None]:
    """Have every wait for a collective last until the backend's worker thread has dropped the collective's tensors.

    It drops them just after it reports the collective done, and what another thread frees is not metered: unless the
    worker is first, a tensor that is gone would count as live. Reference counts show that it was.
    """
    functional: Any = torch.ops._c10d_functional.wait_tensor
    waits = [(dist.Work, "wait", _wait_by_handle), (functional, "_op", _wait_by_tensor)]
    waits += [(functional.default, "_op", _wait_by_tensor)]  # compiled code's
    before = [getattr(owner, name) for owner, name, _ in waits]
    for (owner, name, patient), wait in zip(waits, before, strict=True):
        setattr(owner, name, patient(wait))
    try:
        yield
    finally:
        for (owner, name, _), wait in zip(waits, before, strict=True):
            setattr(owner, name, wait)


def _wait_by_handle(wait: Callable[..., Any]) -> Callable[..., Any]:
    """The caller holds the handle until after, and the handle its tensors: once the worker has dropped it, one
    reference is left, the caller's."""

    def patient(handle: dist.Work, *args: Any, **kwargs: Any) -> Any:
        done = wait(handle, *args, **kwargs)
        if handle._get_op_type() == _OF_ANOTHER:  # type: ignore[attr-defined]
            time.sleep(_MOMENT)
        # A Python object of pybind11's begins with the address of the C++ object that it stands for.
        address = ctypes.c_size_t.from_address(id(handle) + object.__basicsize__).value
        _wait_until(lambda: torch._C._storage_Use_Count(address) <= 1)
        return done

    return patient


def _wait_by_tensor(wait: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor waits by an operator, which drops the handles of the tensor; each holds it until the worker drops it."""

    def patient(tensor: torch.Tensor) -> torch.Tensor:
        references, handles = _references(tensor), c10d._get_work_registry_size()
        done = wait(tensor)
        if dropped := handles - c10d._get_work_registry_size():
            # Of a result that was padded only a part is waited for, and someone else may hold the whole as well.
            seconds = _PATIENCE if tensor.nbytes == tensor.untyped_storage().nbytes() else _MOMENT
            _wait_until(lambda: _references(tensor) <= references - dropped, seconds)
            time.sleep(_MOMENT)  # what else the handle held, as reducing to scatter does, and copies
        return done

    return patient


def _references(tensor: torch.Tensor) -> int:
    """To it, and of tensors to its bytes: a handle holds it, or another that shares its bytes."""
    count = tensor._use_count()  # type: ignore[attr-defined]
    return count + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _wait_until(condition: Callable[[], bool], seconds: float = _PATIENCE) -> None:
    """But no longer than that: someone else may hold a reference, too."""
    end = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < end:
        os.sched_yield()

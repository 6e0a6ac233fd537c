"""What a call may leave behind on a rank, where the next test's call would meet it.

before = RankState()
function()
before.restore()  # ["torch's default dtype", "the environment's SEED"]: what was changed, and is as before again
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LIBRARIES = ("TORCH", "PYTORCH", "TRITON", "KINETO", "KMP", "OMP", "MKL", "CUDA", "NCCL", "GLOO")
"""How variables begin that libraries set for themselves when they are first used."""

PATCHED = (torch, torch.Tensor, torch.nn.functional, torch.autograd, torch.optim, nn.Module, dist)
"""Where a test's own code may have put something in place of PyTorch's."""

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the working directory": (os.getcwd, os.chdir),
}


class RankState:
    """As it is now. Seeds are not in it: each call is seeded anew."""

    def __init__(self) -> None:
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}
        self._environment = dict(os.environ)
        self._attributes = [dict(vars(owner)) for owner in PATCHED]
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._group = dist.group.WORLD

    def restore(self) -> list[str]:
        """Put back what is no longer so, and name it."""
        changed = []
        for name, (get, put) in _SETTINGS.items():
            try:
                same = get() == self._settings[name]
            except OSError:  # a working directory that is gone
                same = False
            if not same:
                put(self._settings[name])
                changed.append(name)
        now = dict(os.environ)
        for variable in sorted({*now, *self._environment}):
            if now.get(variable) != self._environment.get(variable) and not variable.startswith(LIBRARIES):
                changed.append(f"the environment's {variable}")
                if variable in self._environment:
                    os.environ[variable] = self._environment[variable]
                else:
                    del os.environ[variable]
        for owner, before in zip(PATCHED, self._attributes, strict=True):
            for attribute, value in before.items():
                own = attribute.startswith("__")  # PyTorch's compiler puts its own in place of nn.Module's
                if not own and vars(owner).get(attribute, value) is not value and callable(value):
                    setattr(owner, attribute, value)
                    changed.append(f"{getattr(owner, '__name__', owner)}.{attribute}")
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number, handler in self._handlers.items() if in_main_thread else ():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
                changed.append(f"the handler of {number.name}")
        return changed

    def is_broken(self) -> str | None:
        """What cannot be put back: the process group is not the one there was."""
        return None if dist.group.WORLD is self._group else "another process group, or none, in place of the world's"

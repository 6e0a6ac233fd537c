"""Snapshot of a rank's process, so that one test's call does not affect the next one.

before = RankState()
function()
before.restore()  # ["torch's default dtype", "the environment's SEED"]: changed in Python, restored
before.broken()  # "the mode of new files (umask) changed": not restored, so the ranks have to be replaced

Python's state is restored. State that only the operating system holds (limits, scheduling, signals) is not.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardmark.ranks.attributes import Attributes
from shardmark.ranks.process_settings import OPERATING_SYSTEM, PYTHON
from shardmark.ranks.threads import Threads
from shardmark.ranks.torch_settings import TORCH

SET_BY_LIBRARIES = (
    *("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KINETO_", "KMP_"),
    *(
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "DISABLE_CUPTI_LAZY_REINIT",
        "TEARDOWN_CUPTI",
        "TORCH_WARM_POOL",
    ),
)
"""Beginnings of environment variables that PyTorch, its compiler and its profiler set when they are first used."""

SETTINGS = {**TORCH, **PYTHON}
"""How to read and how to restore each setting."""

MOST_NAMED = 3
"""Attributes, and environment variables, named in a warning; the others are counted."""


class RankState:
    """Snapshot of the process's global settings, without random seeds: each call is seeded anew."""

    attributes = Attributes()
    attributes.look()  # in the server of ranks: it takes longer than to start a rank

    def __init__(self) -> None:
        # Under torchrun pytest runs in the process of rank 0, and what a test patches is no call's doing.
        self.attributes.look(again=multiprocessing.parent_process() is None)
        self._settings = {name: get() for name, (get, _) in SETTINGS.items()}
        self._system = {name: get() for name, get in OPERATING_SYSTEM.items()}
        self._path = list(sys.path)
        self._environment = dict(os.environ)
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._threads = Threads()
        self._kernels = _kernels()
        self._group = dist.group.WORLD
        self._unrestored: list[str] = []

    def restore(self) -> list[str]:
        """Restore what has changed in Python, and return its names."""
        changed = _shortened(self.attributes.put_back(), "", "more functions or classes")
        if self._modes():  # a mode intercepts PyTorch's own getters
            return changed
        for name, (get, put) in SETTINGS.items():
            try:
                same = bool(get() == self._settings[name])
            except Exception:  # a working directory that is gone, or settings that contradict each other
                same = False
            if not same:
                try:
                    put(self._settings[name])
                    changed.append(name)
                except Exception:
                    self._unrestored.append(name)
        if (sys.stdin, sys.stdout, sys.stderr) != self._streams:
            sys.stdin, sys.stdout, sys.stderr = self._streams
            changed.append("sys.stdin, stdout or stderr")
        if missing := [folder for folder in self._path if folder not in sys.path]:  # libraries add to it
            sys.path[:0] = missing
            changed.append("sys.path")
        return changed + self._restore_environment()

    def broken(self) -> str | None:
        """The change that is not restored, in words; None if there is none. Called after `restore`."""
        if dist.group.WORLD is not self._group:
            return "another process group, or none, in place of the world's"
        if modes := self._modes():
            return f"{modes} entered"
        if any(stream is None or getattr(stream, "closed", False) for stream in self._streams):
            return "sys.stdin, stdout or stderr closed"
        system = [name for name, get in OPERATING_SYSTEM.items() if get() != self._system[name]]
        if changed := self._unrestored + system:
            return f"{' and '.join(changed)} changed"
        if overridden := _overridden(_kernels() - self._kernels):
            return f"an override of {', '.join(_shortened(overridden, '', 'more'))}"
        if working := self._threads.at_work():
            return f"{working} still at work"
        return None

    def _restore_environment(self) -> list[str]:
        now = dict(os.environ)
        changed = []
        for variable in sorted({*now, *self._environment}):
            if now.get(variable) != self._environment.get(variable) and not variable.startswith(SET_BY_LIBRARIES):
                changed.append(variable)
                if variable in self._environment:
                    os.environ[variable] = self._environment[variable]
                else:
                    del os.environ[variable]
        return _shortened(changed, "the environment's ", "more of the environment's variables")

    def _modes(self) -> str | None:
        modes = [each for each in _get_current_function_mode_stack() if not isinstance(each, DeviceContext)]
        modes += _get_current_dispatch_mode_stack()
        if torch.is_inference_mode_enabled():
            return "inference mode"
        return type(modes[-1]).__name__ if modes else None


def _shortened(names: list[str], before: str, more: str) -> list[str]:
    """The first few names, each with `before`, and the number of the others."""
    named, left = [f"{before}{name}" for name in names[:MOST_NAMED]], len(names) - MOST_NAMED
    return [*named, f"{left} {more}"] if left > 0 else named


def _kernels() -> set[str]:
    """Kernels that Python has registered, such as "aten/mul/CPU"."""
    found: set[str] = getattr(torch.library, "_impls", set())
    return found.copy()


def _overridden(kernels: set[str]) -> list[str]:
    """PyTorch's operators among them. Kernels of fake tensors ("Meta") PyTorch registers itself, at their first use."""
    ours = (key for key in kernels if key.startswith(("aten/", "c10d/")) and not key.endswith("/Meta"))
    return sorted({key.rpartition("/")[0].replace("/", "::") for key in ours})


class Messages:
    """Counts of messages that this rank has sent to each other rank, and received, in its world's process group.

    A message that no call has received would go to the next test's `recv`, and no collective notices it.
    """

    total = 0
    """Messages since this rank joined."""
    _sent: ClassVar[Counter[int]] = Counter()
    _received: ClassVar[Counter[int]] = Counter()

    @classmethod
    def count(cls) -> None:
        """Begin to count."""
        group: Any = dist.ProcessGroup
        group.send = _counted(group.send, cls._sent)
        group.recv = _counted(group.recv, cls._received)
        group.recv_anysource = _counted(group.recv_anysource, cls._received)

    @classmethod
    def since_last(cls) -> tuple[dict[int, int], dict[int, int]]:
        """Messages sent and received since the last call of this, each by rank."""
        found = dict(cls._sent), dict(cls._received)
        cls.total += cls._sent.total() + cls._received.total()
        cls._sent.clear()
        cls._received.clear()
        return found


def _counted(method: Callable[..., Any], counter: Counter[int]) -> Callable[..., Any]:
    def counted(group: Any, tensors: Any, *rank_and_tag: int) -> Any:
        if group is dist.group.WORLD:
            counter[rank_and_tag[0]] += 1  # for `recv_anysource` this is the tag
        return method(group, tensors, *rank_and_tag)

    return counted


def seed_rank(seed: int) -> None:
    """Seed the random generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

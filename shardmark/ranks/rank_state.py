"""Snapshot of a rank's process, so that one test's call does not affect the next one.

before = RankState()
function()
before.restore()  # ["torch's default dtype", "the environment's SEED"]: changed in Python, restored
before.broken()  # "the mode of new files (umask) changed": not restored, so the ranks have to be replaced

Python's state is restored. State that only the operating system holds (limits, scheduling, signals) is not.
"""

from __future__ import annotations

import builtins
import math
import operator
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardmark.ranks.process_settings import OPERATING_SYSTEM, PYTHON

LIBRARIES = ("TORCH", "_TORCH", "PYTORCH", "TRITON", "KINETO", "KMP", "OMP", "MKL", "CUDA", "NCCL", "GLOO")
"""Prefixes of environment variables that libraries set when they are first used."""

PATCHED = [torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.autograd, torch.optim, nn.Module, dist]
PATCHED += [builtins, time, math, random, np]
PATCHED += [each for package in (nn, torch.optim) for each in vars(package).values() if isinstance(each, type)]
"""Modules and classes whose attributes a test may have replaced."""

WORKERS = ("torch", "triton", "concurrent", "multiprocessing", "tqdm")
"""Packages that start threads once in a process, which then wait for work: such a thread is no leftover."""
ENDING = 0.1
"""Seconds that a thread may outlive the call that started it."""
MOST_NAMED = 3
"""Environment variables named in a warning; the others are counted."""


class RankState:
    """Snapshot of the process's global settings, without random seeds: each call is seeded anew."""

    def __init__(self) -> None:
        self._settings = {name: get() for name, (get, _) in PYTHON.items()}
        self._system = {name: get() for name, get in OPERATING_SYSTEM.items()}
        self._path = list(sys.path)
        self._environment = dict(os.environ)
        self._attributes = [(owner, vars(owner).copy()) for owner in PATCHED]
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._threads = set(sys._current_frames())
        self._group = dist.group.WORLD
        self._unrestored: list[str] = []

    def restore(self) -> list[str]:
        """Restore what has changed in Python, and return its names."""
        changed = self._restore_attributes()
        if self._modes():  # a mode intercepts PyTorch's own getters
            return changed
        for name, (get, put) in PYTHON.items():
            try:
                same = bool(get() == self._settings[name])
            except OSError:  # a working directory that is gone
                same = False
            if not same:
                try:
                    put(self._settings[name])
                    changed.append(name)
                except OSError:  # a working directory that is gone
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
        if running := self._running_threads():
            return f"{running} still running"
        return None

    def _restore_attributes(self) -> list[str]:
        changed = []
        for owner, before in self._attributes:
            now = vars(owner)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            found = [name for name, value in before.items() if now.get(name) is not value and callable(value)]
            if isinstance(owner, type):  # new attributes that hide inherited ones
                found += [name for name in now.keys() - before.keys() if any(name in vars(c) for c in owner.mro()[1:])]
            for name in found:
                if _is_pytorchs_doing(owner, name):
                    continue
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
                changed.append(f"{getattr(owner, '__name__', owner)}.{name}")
        return changed

    def _restore_environment(self) -> list[str]:
        now = dict(os.environ)
        changed = []
        for variable in sorted({*now, *self._environment}):
            if now.get(variable) != self._environment.get(variable) and not variable.startswith(LIBRARIES):
                changed.append(variable)
                if variable in self._environment:
                    os.environ[variable] = self._environment[variable]
                else:
                    del os.environ[variable]
        named = [f"the environment's {variable}" for variable in changed[:MOST_NAMED]]
        more = len(changed) - MOST_NAMED
        return [*named, f"{more} more of the environment's variables"] if more > 0 else named

    def _modes(self) -> str | None:
        modes = [each for each in _get_current_function_mode_stack() if not isinstance(each, DeviceContext)]
        modes += _get_current_dispatch_mode_stack()
        if torch.is_inference_mode_enabled():
            return "inference mode"
        return type(modes[-1]).__name__ if modes else None

    def _running_threads(self) -> str | None:
        end = time.monotonic() + ENDING
        while running := [frame for frame in self._new_threads() if _works(frame)]:
            if time.monotonic() > end:
                return "a thread" if len(running) == 1 else f"{len(running)} threads"
            time.sleep(ENDING / 20)
        return None

    def _new_threads(self) -> list[FrameType]:
        """Frames of new threads, without daemons, such as a wrapper's own that waits for collectives."""
        daemons = {thread.ident for thread in threading.enumerate() if thread.daemon}
        return [f for thread, f in sys._current_frames().items() if thread not in self._threads | daemons]


def _is_pytorchs_doing(owner: Any, name: str) -> bool:
    """Whether PyTorch itself changes the attribute: with the default dtype, the compiler, or the first optimizer of a
    class."""
    if owner is torch or owner is nn.Module:
        return name == "Storage" or name.startswith("__")
    now = vars(owner).get(name)
    return hasattr(now, "hooked") or hasattr(now, "_torchdynamo_disable")


def _works(frame: FrameType | None) -> bool:
    """Whether the thread at that frame runs a user's code."""
    packages = set()
    while frame is not None:
        packages.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return packages.isdisjoint(WORKERS)


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

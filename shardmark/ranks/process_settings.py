"""A process's settings that a call may change: Python's and NumPy's are restored, the operating system's compared."""

from __future__ import annotations

import decimal
import faulthandler
import gc
import locale
import logging
import operator
import os
import resource
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardmark.ranks.torch_settings import Setting


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGCHLD})
"""Signals whose handlers are compared; data loaders handle SIGCHLD."""
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def _errors_of_warnings() -> list[Any]:
    return [each for each in warnings.filters if each[0] == "error"]


def _set_errors_of_warnings(before: list[Any]) -> None:
    kept = [each for each in warnings.filters if each[0] != "error" or each in before]
    warnings.filters[:] = kept  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _set_logging(before: tuple[int, int]) -> None:
    logging.root.setLevel(before[0])
    logging.disable(before[1])


def _decimals() -> tuple[Any, ...]:
    """Arguments of a context like that of this thread; flags that computing has raised are left out."""
    now = decimal.getcontext()
    traps = [signal_ for signal_, is_set in now.traps.items() if is_set]
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, [], traps


class Watchdog:
    """Notices that a call has set faulthandler's watchdog, which would end the process, or write stacks, later."""

    is_set = False

    @classmethod
    def notice(cls) -> None:
        """Begin to notice."""
        later, cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

        def dump_traceback_later(*args: Any, **kwargs: Any) -> None:
            cls.is_set = True
            later(*args, **kwargs)

        def cancel_dump_traceback_later() -> None:
            cls.is_set = False
            cancel()

        faulthandler.dump_traceback_later = dump_traceback_later
        faulthandler.cancel_dump_traceback_later = cancel_dump_traceback_later


PYTHON: dict[str, Setting] = {
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the seconds between threads": (sys.getswitchinterval, sys.setswitchinterval),
    "the interpreter's trace function": (sys.gettrace, sys.settrace),
    "the interpreter's profile function": (sys.getprofile, sys.setprofile),
    "how modules are found (sys.meta_path)": (
        lambda: [*sys.meta_path],
        partial(operator.setitem, sys.meta_path, slice(None)),
    ),
    "garbage collection": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "what garbage collection calls": (lambda: [*gc.callbacks], partial(operator.setitem, gc.callbacks, slice(None))),
    "the working directory": (os.getcwd, os.chdir),
    "the folder of temporary files": (lambda: tempfile.tempdir, partial(setattr, tempfile, "tempdir")),
    "the locale": (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    "the default timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the level of logging": (lambda: (logging.root.level, logging.root.manager.disable), _set_logging),
    "how decimals are rounded": (_decimals, lambda before: decimal.setcontext(decimal.Context(*before))),
    "how NumPy handles errors": (np.geterr, lambda before: np.seterr(**before)),
    "how NumPy prints": (np.get_printoptions, lambda before: np.set_printoptions(**before)),
    "a filter that makes warnings errors": (_errors_of_warnings, _set_errors_of_warnings),
    "a watchdog of faulthandler": (lambda: Watchdog.is_set, lambda _: faulthandler.cancel_dump_traceback_later()),
}
"""How to read and how to restore each setting of Python's and NumPy's."""


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
    "its process group": os.getpgrp,
    "its priority": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "a timer": lambda: [signal.getitimer(timer)[0] > 0 for timer in _TIMERS],
    "a signal handler": lambda: [signal.getsignal(number) for number in _SIGNALS],
    "the mask of blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "the file behind its standard input, output or error": lambda: [_file(number) for number in range(3)],
}
"""How to read each setting. No setting is restored: a rank that changed one is replaced."""

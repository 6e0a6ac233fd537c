"""Machine instructions of one step, counted by the processor through Linux's perf_event_open.

    executed = instructions(workload)    # one more step; user space alone, all threads that the process has

A figure with a little noise (threads that wait in a loop, the layout of memory), so it is shown and not compared. Many
virtual machines, containers and kernels allow no such counting: `why_not_countable` says why.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from shardmark.api.workload import Workload

_SYSCALL = {"x86_64": 298, "aarch64": 241}
"""Number of perf_event_open by architecture."""
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
"""perf_event_attr in its first version: type, size, config, sample period, sample type, read format, flags, ..."""
_HARDWARE, _INSTRUCTIONS = 0, 1
_TIMES = 0b11
"""Read format: with the time that the counter was on, and the time that the processor had a register for it."""
_USER_SPACE_ALONE = 1 << 0 | 1 << 5 | 1 << 6
"""Flags: begins disabled, without the kernel and the hypervisor."""
_ENABLE, _DISABLE = 0x2400, 0x2401
_REASONS = {
    errno.EACCES: "the kernel forbids it, see /proc/sys/kernel/perf_event_paranoid",
    errno.EPERM: "the kernel or the container forbids it",
    errno.ENOENT: "the processor shows no such counter, as in most virtual machines",
    errno.EOPNOTSUPP: "the processor shows no such counter, as in most virtual machines",
    errno.ENODEV: "the processor shows no such counter, as in most virtual machines",
    errno.ENOSYS: "the kernel lacks perf_event_open",
}


def instructions(workload: Workload) -> int | None:
    """Machine instructions of one step; None where the processor did not count all of it."""
    with counting() as found:
        workload.prepare()
        for counter in found:
            fcntl.ioctl(counter, _ENABLE, 0)
        workload.step(lambda part: None)
        for counter in found:
            fcntl.ioctl(counter, _DISABLE, 0)
        values = [struct.unpack("=QQQ", os.read(counter, 24)) for counter in found]
    if any(running < enabled for _, enabled, running in values):  # the counters took turns in the processor's registers
        return None
    return sum(value for value, _, _ in values) or None


def why_not_countable() -> str:
    """The reason why this process cannot count its instructions; empty where it can."""
    try:
        os.close(_counter(0))
    except OSError as error:
        return _REASONS.get(error.errno or 0, str(error))
    return ""


@contextmanager
def counting() -> Iterator[list[int]]:
    """File descriptors of a counter for each thread of this process; raises OSError where they cannot be counted."""
    with ExitStack() as opened:
        counters = []
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                counters.append(_counter(int(thread)))
                opened.callback(os.close, counters[-1])
        yield counters


def _counter(thread: int) -> int:
    """A file descriptor that counts one thread's instructions (0: the calling thread's)."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"the number of perf_event_open is not known on {platform.machine()}")
    attributes = _ATTRIBUTES.pack(_HARDWARE, _ATTRIBUTES.size, _INSTRUCTIONS, 0, 0, _TIMES, _USER_SPACE_ALONE, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    any_cpu, no_group, close_on_exec = -1, -1, 8
    found: int = libc.syscall(number, attributes, thread, any_cpu, no_group, close_on_exec)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found

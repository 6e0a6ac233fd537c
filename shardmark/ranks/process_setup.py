"""Set up a process before it computes: its GPU, its cores, its allocator, and compiled code for its instructions."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

from shardmark.ranks.nvml import pci_address

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of options in C's malloc.h."""

TURNED = "SHARDMARK_DEVICES_OF_WORKER"
"""Environment variable: the worker for which the visible devices have been reordered."""


def keep_compiled_code_apart() -> None:
    """Share compiled code on disk only with processes that have the same instructions (AVX2, AVX-512).

    PyTorch's cache key of a compiled graph leaves the instructions out. Another machine that shares the folder, or this
    one with ATEN_CPU_CAPABILITY set, would run code for vectors of another length and get wrong numbers.
    """
    config, instructions = torch.compiler.config, torch.backends.cpu.get_cpu_capability()
    if not config.cache_key_tag.endswith(instructions):
        config.cache_key_tag += instructions


def begin_with_own_device() -> None:
    """Give each worker of pytest-xdist another first GPU, so that tests on one GPU use all of them.

    A worker still sees every GPU, in another order, so its worlds may be as large. Called before CUDA starts. A pytest
    that a test starts keeps its parent's order.
    """
    if TURNED in os.environ:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else [str(i) for i in range(torch.cuda.device_count())]
    if worker.isdigit() and len(devices) > 1:
        first = int(worker) % len(devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])
        os.environ[TURNED] = worker


def let_segments_grow() -> None:
    """Before CUDA starts, let its allocator's segments grow, unless the user has configured it.

    The free parts that one case leaves in segments of fixed size may be too small for the next case's tensors.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Let C's allocator keep freed blocks below 32 MiB for the next step, as CUDA's caching allocator does, unless the
    user has configured it (mallopt(3); only glibc has it).

    It would return the top of its heap to the operating system whenever that is large, and so a step's page faults
    depend on the heap's layout, which all processes of one forkserver share. Equal versions of a step of 15 ms took
    0.76 to 1.29 times as long as each other, with 1,800 to 8,200 faults, in each process of a run alike; with what is
    freed kept, 0.97 to 1.02 times. Larger blocks have pages of their own in any layout.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest that it takes
        mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Return to the operating system what `keep_freed_memory` keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bind_to_cores(rank: int, size: int) -> None:
    """Run on this rank's share of the cores, and preempt no other thread on waking (SCHED_BATCH).

    Ranks that communicate wake each other's threads all the time. As Linux schedules by default, a thread that wakes
    preempts another, here or on another rank's core: an all-reduce of half a megabyte between two ranks on two cores
    took 0.3 or 3 ms, as it happened, and a step's time had a standard deviation of 31%; bound, without preemption, 15%.
    """
    cores = sorted(os.sched_getaffinity(0), key=_socket_and_core)
    with suppress(OSError):  # a sandbox may forbid it
        if len(cores) >= size:
            os.sched_setaffinity(0, cores[rank * len(cores) // size : (rank + 1) * len(cores) // size])
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # unless the user has chosen one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def bind_near_gpu(device: int) -> None:
    """Run on the cores of that GPU's NUMA node, of those that the process may use, with at most as many threads.

    A launch, or a copy to the host, that crosses sockets takes longer. After `taskset` to cores that are all elsewhere,
    and where Linux does not say which cores are near, nothing changes.
    """
    near = os.sched_getaffinity(0) & _cores_near(pci_address(device))
    if not near:
        return
    for thread in os.listdir("/proc/self/task"):  # CUDA has started some
        with suppress(OSError):  # a sandbox may forbid it; ended in the meantime
            os.sched_setaffinity(int(thread), near)
    torch.set_num_threads(min(torch.get_num_threads(), len(near)))


def _cores_near(address: str | None, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Linux's CPUs on the NUMA node of the device at that PCI address, from a list such as "0-15,64-79"."""
    with suppress(OSError, ValueError):
        ranges = (devices / str(address) / "local_cpulist").read_text().strip().split(",")
        ends = [(int(first), int(last or first)) for first, _, last in (each.partition("-") for each in ranges)]
        return {cpu for first, last in ends for cpu in range(first, last + 1)}
    return set()


def _socket_and_core(cpu: int) -> tuple[int, int, int]:
    """Sort key of Linux's `cpu`: hardware threads of one core, and cores of one socket, stay together."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # a sandbox may hide it
        socket, core = 0, cpu
    return socket, core, cpu

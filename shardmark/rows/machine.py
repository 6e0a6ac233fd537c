"""The machine, as a run's `machine_info` describes it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardmark.meter.instructions import why_not_countable
from shardmark.ranks.gpus import driver_version
from shardmark.ranks.rank import available_cores, threads_of_a_rank
from shardmark.ranks.torchrun import launched
from shardmark.rows.gpus import describe_gpus


def describe_machine(device: str) -> dict[str, Any]:
    """Fields of `machine_info` beside pytest-benchmark's own.

    "cores" are those that the ranks share; "threads" are those of a rank that is alone. "instructions" says whether a
    step's machine instructions can be counted. On CUDA there are those of `describe_gpus` too.
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    why_not = why_not_countable()
    return {
        "device": device,
        "gpus": gpus,
        "driver": driver_version() if gpus else None,
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if gpus else _memory_bytes(),
        "cores": available_cores(),
        "threads": torch.get_num_threads() if launched() else threads_of_a_rank(1),
        "scheduling": chosen_policy(),
        "torch": torch.__version__,
        "triton": triton_version,
        "libc": " ".join(platform.libc_ver()),
        "cpu_part": _cpu_part(),
        "instructions": f"not countable: {why_not}" if why_not else "counted",
        **(describe_gpus() if gpus else {}),
    }


def chosen_policy() -> str:
    """The scheduling policy that the user has chosen, as with chrt, and that ranks inherit.

    Empty for Linux's default, and for SCHED_BATCH, which ranks have where the user has chosen none.
    """
    chosen = {getattr(os, name): name for name in ("SCHED_FIFO", "SCHED_IDLE", "SCHED_RR")}
    return chosen.get(os.sched_getscheduler(0), "")


def _cpu_part(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Numbers of an Arm core's implementer, variant, part and revision; empty where Linux does not say them.

    On other processors pytest-benchmark's "cpu" has the family, the model and the stepping.
    """
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    names = ("CPU implementer", "CPU variant", "CPU part", "CPU revision")
    return " ".join(filter(None, map(found.get, names)))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Functions that tests run on ranks."""

import os
import re
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist


def identity() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def scaled_sum(tensor: torch.Tensor, factor: float, device: str) -> torch.Tensor:
    tensor = tensor.to(device) * factor * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.cpu()


def hang_in_c_with_the_interpreter_locked() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def size_of(data: bytes) -> int:
    return len(data)


def start_a_sleeper(options: dict[str, Any] | None = None) -> int:
    """Start a process that sleeps, with those options of Popen; its process id."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **(options or {})).pid


def cores_and_policies() -> tuple[list[int], list[int]]:
    """The cores that this rank may use, and the scheduling policies of its threads, the process group's included."""
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    assert len(threads) > 1
    return sorted(os.sched_getaffinity(0)), sorted({os.sched_getscheduler(thread) for thread in threads})

"""Set up a process before it computes: its own GPU first, compiled code for its own instructions."""

from __future__ import annotations

import os

import torch

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

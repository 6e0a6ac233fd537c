"""This process's place on the machine: its own GPU first, and compiled code of its own instructions."""

from __future__ import annotations

import os

import torch

TURNED = "SHARDMARK_DEVICES_OF_WORKER"
"""The environment's name of the worker whose order the visible devices have."""


def keep_compiled_code_apart() -> None:
    """Have the compiler's files on disk serve only processes with the same instructions (AVX2, AVX-512).

    PyTorch's key of a compiled graph leaves them out. So another machine that shares the folder, or this one with
    ATEN_CPU_CAPABILITY set, would run code for vectors of another length, and get wrong numbers.
    """
    config, instructions = torch.compiler.config, torch.backends.cpu.get_cpu_capability()
    if not config.cache_key_tag.endswith(instructions):
        config.cache_key_tag += instructions


def begin_with_own_device() -> None:
    """Have each of pytest-xdist's workers begin with another GPU, so that tests that take one run on all of them.

    A worker's devices are still all, the others behind its own: its worlds have as many ranks. Before CUDA starts, and
    once: a pytest that a test runs has them in that order already.
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

"""What a machine lacks, found out by trying, once in a process.

Whether there is a C++ compiler, and one that works, with headers that it finds and a folder that it may write, nobody
knows before code has been compiled and run. That takes seconds: so it is tried when a test that needs it is about to
run. What is compiled stays on disk, where the next process finds it.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import cache

import torch
from torch import Tensor

TURNED = "SHARDMARK_DEVICES_OF_WORKER"
"""The environment's name of the worker whose order the visible devices have."""


@cache
def requires_compiler(device: str) -> str | None:
    """Reason unless what `torch.compile` makes for `device` runs there, forward and backward."""
    dtypes = (torch.float32, torch.bfloat16)
    x, y = (torch.ones(8, 40, device=device, dtype=dtype, requires_grad=True) for dtype in dtypes)
    try:
        with warnings.catch_warnings(action="ignore"):  # that no header was found, say, before the error
            torch.compile(_loss, fullgraph=True, dynamic=False)(x, y).backward()
    except Exception as error:  # whatever the compiler, the linker or the file system raises is the reason
        if "InvalidCxxCompiler" in str(error):
            return "torch.compile finds no C++ compiler that works: install g++, or name one in CXX"
        return f"torch.compile does not work here: {error_line(error)}"
    return None


def _loss(x: Tensor, y: Tensor) -> Tensor:
    """What most compiled code is made of: vectors, a reduction, and two dtypes."""
    return (torch.softmax(x, -1) * torch.nn.functional.silu(y)).sum()


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


def error_line(error: BaseException) -> str:
    """An error's type and first line; of code that did not compile the first complaint, whatever its language."""
    _, _, output = str(error).partition("\nOutput:\n")
    if complaint := re.search(r"^\S.*?:\d+:\d+: (.+)", output, re.MULTILINE) or re.search(r"(.+)", output):
        return complaint[1]
    inner = getattr(error, "inner_exception", error)  # Dynamo's errors wrap the backend's
    first = next(iter(str(inner).strip().splitlines()), "")
    return f"{type(inner).__name__}: {first}"

"""Requirements of implementations: a CUDA device, a working compiler. A process tries the compiler once.

Only compiling and running code shows whether a C++ compiler works, finds its headers and may write its folder. This
takes seconds, so the compiler is tried when the first test that needs it is about to run. Compiled code stays on disk,
where the next process finds it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from shardmark.api.finding import first_line

Requirement = Callable[[str], str | None]
"""Given the device ("cpu" or "cuda"): None where the implementation runs, else the reason why not."""


def requires_cuda(device: str) -> str | None:
    """Reason unless the run is on CUDA."""
    return None if device == "cuda" else "needs a CUDA device"


@cache
def requires_compiler(device: str) -> str | None:
    """Reason unless code that `torch.compile` makes for `device` runs there, forward and backward."""
    dtypes = (torch.float32, torch.bfloat16)
    x, y = (torch.ones(8, 40, device=device, dtype=dtype, requires_grad=True) for dtype in dtypes)
    try:
        with warnings.catch_warnings(action="ignore"):  # such as one on a missing header, before the error
            torch.compile(_loss, fullgraph=True, dynamic=False)(x, y).backward()
    except Exception as error:  # whatever the compiler, the linker or the file system raises is the reason
        if "InvalidCxxCompiler" in str(error):
            return "torch.compile finds no C++ compiler that works: install g++, or name one in CXX"
        return f"torch.compile does not work here: {error_line(error)}"
    return None


def _loss(x: Tensor, y: Tensor) -> Tensor:
    """A sample of what most compiled code has: vectors, a reduction, two dtypes."""
    return (torch.softmax(x, -1) * torch.nn.functional.silu(y)).sum()


def error_line(error: BaseException) -> str:
    """An error's type and first line; for code that did not compile, the compiler's first complaint."""
    _, _, output = str(error).partition("\nOutput:\n")
    if complaint := re.search(r"^\S.*?:\d+:\d+: (.+)", output, re.MULTILINE) or re.search(r"(.+)", output):
        return complaint[1]
    inner = getattr(error, "inner_exception", error)  # Dynamo's errors wrap the backend's
    return f"{type(inner).__name__}: {first_line(inner)}"

"""Requirements of Triton kernels: Triton, and a GPU or Triton's interpreter.

In the interpreter results are right, and times and bytes mean nothing. Where Triton is not installed a kernel's file
cannot be imported, and its family registers the implementation without a target.
"""

from __future__ import annotations

from functools import cache

import torch

from shardmark.api import error_line

try:
    import triton
    import triton.language as tl
    from triton import knobs
except ImportError as error:
    NO_TRITON: str | None = f"Triton cannot be imported: {error_line(error)}"
else:
    NO_TRITON = None

    @triton.jit
    def double(x, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.arange(0, BLOCK)
        tl.store(x + columns, 2 * tl.load(x + columns, mask=columns < length), mask=columns < length)


def requires_triton(device: str) -> str | None:
    """Return the reason unless Triton's kernels run: on CUDA, or in Triton's interpreter."""
    if NO_TRITON is not None:
        return NO_TRITON
    if device != "cuda" and not knobs.runtime.interpret:
        return "needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter on CPU"
    return _failure(device)


@cache
def _failure(device: str) -> str | None:
    """Run a kernel once per process; return why it failed, or None. CUDA needs a C compiler and a writable folder."""
    try:
        double[(1,)](torch.ones(3, device=device), 3, BLOCK=4)
    except Exception as error:  # any error of Triton, the compiler or the file system is the reason
        return f"Triton does not work here: {error_line(error)}"
    return None


def requires_no_interpreter(device: str) -> str | None:
    """Return the reason unless the run is on CUDA: in the interpreter times and bytes are not the kernel's."""
    return None if device == "cuda" else "on CPU it runs in Triton's interpreter, for correctness only"

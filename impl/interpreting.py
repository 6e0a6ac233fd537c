"""What a Triton kernel requires: a GPU, or Triton's interpreter, in which it is right and its times mean nothing."""

from __future__ import annotations

from triton import knobs


def requires_triton(device: str) -> str | None:
    """Reason unless the run is on CUDA, or in Triton's interpreter."""
    if device == "cuda" or knobs.runtime.interpret:
        return None
    return "needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter on CPU"


def requires_no_interpreter(device: str) -> str | None:
    """Reason unless the run is on CUDA, where times and bytes are the kernel's own."""
    return None if device == "cuda" else "on CPU it runs in Triton's interpreter, for correctness alone"

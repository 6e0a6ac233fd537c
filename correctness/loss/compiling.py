"""Compile the fused loss's Triton kernel for a chip, in the process of the fixture `compiling`."""

from typing import Any

import torch

from correctness.support.compiling import compiled


def compile_loss(dtype: str, chip: int, smoothed: bool, configuration: tuple[int, int], vocab: int = 50257) -> Any:
    """Return the `KernelReport` of the fused loss's kernel with that block and number of warps, and its `accesses`.
    Rows of logits have the fused loss's stride."""
    from impl.loss import fused_triton
    from impl.loss.accounting import row_stride
    from impl.loss.fused import Terms

    fused_triton.configuration = lambda vocab: configuration
    element = getattr(torch, dtype)
    logits = torch.empty(4, row_stride(vocab, element.itemsize), dtype=element)[:, :vocab]
    terms = Terms(-100, 0.1 if smoothed else 0.0, 1e-4)
    targets = torch.zeros(4, dtype=torch.int64)
    (found,) = compiled(chip, lambda: fused_triton.to_gradients(logits, targets, terms, True))
    return found

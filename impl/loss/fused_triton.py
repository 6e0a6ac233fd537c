"""The fused loss with one Triton kernel, which turns a chunk's logits into their gradients; products are cuBLAS's.

On CPU the kernel runs in Triton's interpreter (TRITON_INTERPRET=1), for correctness only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from impl.interpreting import requires_no_interpreter, requires_triton
from impl.loss import triton_kernels
from impl.loss.accounting import fused_triton_peak
from impl.loss.contract import product_dtype
from impl.loss.fused import Terms, fused_loss
from shardmark.api import Race, Unsupported, register

CONFIGURATIONS = ((1024, 4), (4096, 8), (8192, 16))
"""(BLOCK, warps) of the kernel: at most 16 elements a thread, which spills registers on no chip."""


def fused_loss_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of hidden weightᵀ. Shapes, dtypes and errors: `impl.loss.Loss`. No double backward.

    Takes float32, float16 and bfloat16; Unsupported for float64. Products are torch's own and follow its settings.
    """
    dtype = product_dtype(hidden, weight)
    if dtype == torch.float64:
        raise Unsupported(f"fused_triton takes float32, float16 and bfloat16, got {dtype}")
    if hidden.device.type != "cuda" and not (hidden.device.type == "cpu" and knobs.runtime.interpret):
        raise Unsupported(f"fused_triton takes tensors on CUDA, or on CPU with TRITON_INTERPRET=1, got {hidden.device}")
    # The interpreter truncates to bfloat16 where the hardware rounds, so the interpreter gets float32 logits.
    logits_dtype = torch.float32 if dtype == torch.bfloat16 and knobs.runtime.interpret else dtype
    terms = Terms(ignore_index, label_smoothing, z_loss)
    return fused_loss(to_gradients, hidden, weight, targets, terms, logits_dtype)


def to_gradients(logits: Tensor, targets: Tensor, terms: Terms, needs_gradients: bool) -> Tensor:
    """The sum of the rows' losses; the logits become its gradients. See `impl.loss.fused.ToGradients`."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block, warps = configuration(vocab)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        triton_kernels.loss_and_gradients[(rows,)](
            logits,
            targets.contiguous(),
            losses,
            logits.stride(0),
            vocab,
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            SMOOTHED=terms.label_smoothing > 0,
            WANTED=needs_gradients,
            BLOCK=block,
            num_warps=warps,
        )
    return losses.sum()


def configuration(vocab: int) -> tuple[int, int]:
    """Return the smallest block that holds a row, or the largest block."""
    return next((choice for choice in CONFIGURATIONS if vocab <= choice[0]), CONFIGURATIONS[-1])


register(
    "loss",
    "fused_triton",
    fused_loss_triton,
    memory=fused_triton_peak,
    time=Race("eager", goal=1.0),
    requires=(requires_triton,),
    requires_to_measure=(requires_no_interpreter,),
    called="the fused loss in Triton",
)

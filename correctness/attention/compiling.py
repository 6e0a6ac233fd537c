"""Compile kernels of attention for a chip, in the process of the fixture `compiling`."""

from typing import Any

import torch

ARITHMETIC = {"half": "highest", "ieee": "highest", "tf32x3": "high", "tf32": "medium"}
"""Settings of `torch.set_float32_matmul_precision`, by the arithmetic that each gives float32."""


def compile_tile(kernel: str, arithmetic: str, chip: int, columns: int, tile: tuple[int, int, int, int]) -> Any:
    """Return the `KernelReport` of a causal `kernel` with that tile."""
    from impl.attention import flash_triton, triton_configurations
    from shardmark.meter.aot import compile_only

    torch.set_float32_matmul_precision(ARITHMETIC[arithmetic])
    dtype = torch.bfloat16 if arithmetic == "half" else torch.float32
    q, k = torch.empty(2, 4, 256, columns, dtype=dtype), torch.empty(2, 2, 256, columns, dtype=dtype)
    lse = torch.empty(q.shape[:-1])
    triton_configurations.TABLES = {chip: {arithmetic: {kernel: {columns: [tile]}}}}
    flash_triton.chip_of = lambda device: chip
    flash_triton._tuned.cache_clear()
    operands = {
        "attention_forward": {"q": q, "k": k, "v": k, "out": q},
        "attention_backward_q": {"q": q, "k": k, "v": k, "out": q, "grad_out": q, "grad_q": q, "delta": lse},
        "attention_backward_kv": {"q": q, "k": k, "v": k, "grad_out": q, "grad_k": k, "grad_v": k, "delta": lse},
    }
    with compile_only(chip) as reports:
        flash_triton._Launch(q, k, is_causal=True)(kernel, lse=lse, **operands[kernel])
    (report,) = reports
    return report


def compile_step(head_dim: int, is_causal: bool) -> Any:
    """Return the `KernelReport` of each of `flash_gluon`'s kernels, in order."""
    from impl.attention import flash_gluon
    from shardmark.meter.aot import compile_only

    q, k = (torch.empty(2, heads, 256, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
    lse = torch.empty(q.shape[:-1])
    with compile_only(flash_gluon.HOPPER) as reports:
        flash_gluon.forward(q, k, k, is_causal)
        flash_gluon.backward(is_causal, q, k, k, q, lse, q)
    return reports

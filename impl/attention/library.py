"""PyTorch's own attention: SDPA with the backend that it chooses, SDPA with each backend, and FlexAttention."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from impl.attention import accounting, workspace
from impl.attention.compiled import compile_each_shape
from impl.attention.contract import Attention, check_inputs, kv_group
from impl.attention.eager import eager_attention
from shardmark.api import Implementation, Race, Unsupported, register, requires_compiler, requires_cuda

ALIGNED = 16
"""Bytes that SDPA's fused kernels for CUDA read at once: at another address they end in a misaligned access, which
leaves the GPU with an error, or find no kernel (seen with torch 2.11 on an H200)."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the backend that it chooses.

    Its fused kernels take (batch, heads, seq, head_dim) only; for other shapes it falls back to a kernel with quadratic
    memory. So leading dims are reshaped to those two.
    """
    check_inputs(q, k, v)
    if q.numel() == 0:  # an empty tensor has no batch to reshape to
        return eager_attention(q, k, v, is_causal=is_causal)
    q4, k4, v4 = _batch_and_heads(q, k, v)
    if q.is_cuda and not torch.compiler.is_compiling():  # compiled code allocates its own tensors
        q4, k4, v4 = map(_aligned, (q4, k4, v4))
        out = scaled_dot_product_attention(q4, k4, v4, is_causal=is_causal, enable_gqa=kv_group(q, k) > 1)
        return _AlignedGradient.apply(out).reshape(q.shape)
    out = scaled_dot_product_attention(q4, k4, v4, is_causal=is_causal, enable_gqa=kv_group(q, k) > 1)
    return out.reshape(q.shape)


def _aligned(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNED else x


class _AlignedGradient(torch.autograd.Function):
    """The tensor itself, whose gradient the kernel reads as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _aligned(gradient)


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """Name of the kernel that SDPA chooses for these inputs, such as "flash_attention"."""
    q4, k4, v4 = _batch_and_heads(q, k, v)
    choice: Any = torch._fused_sdp_choice(q4, k4, v4, None, 0.0, is_causal, enable_gqa=kv_group(q, k) > 1)
    return SDPBackend(choice).name.lower()


def pinned(backend: SDPBackend) -> Attention:
    """SDPA with that backend; Unsupported where the backend does not take the inputs."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        if backend != SDPBackend.MATH and any(x.stride(-1) != 1 for x in (q, k, v)):  # but where a reshape copies
            raise Unsupported(f"SDPA's {backend.name} kernel takes tensors whose columns are contiguous")
        with sdpa_kernel(backend):
            try:
                return sdpa(q, k, v, is_causal=is_causal)
            except RuntimeError as error:
                if not re.search("No available kernel|No viable backend|No valid execution plan", str(error)):
                    raise
                mask = "causal" if is_causal else "full"
                raise Unsupported(
                    f"SDPA's {backend.name} kernel does not take {q.dtype} on {q.device.type}, q {tuple(q.shape)} with "
                    f"strides {q.stride()}, k {tuple(k.shape)}, {mask}"
                ) from None

    return attention


MATH = pinned(SDPBackend.MATH)
FLASH = pinned(SDPBackend.FLASH_ATTENTION)
EFFICIENT = pinned(SDPBackend.EFFICIENT_ATTENTION)
CUDNN = pinned(SDPBackend.CUDNN_ATTENTION)


def flex(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Compiled FlexAttention with a causal block mask; Unsupported for head dims below 16 and for float64."""
    check_inputs(q, k, v)
    if q.shape[-1] < 16 or q.dtype == torch.float64:
        raise Unsupported(f"FlexAttention takes head dims from 16 on and no float64, got {q.shape[-1]} of {q.dtype}")
    if q.numel() == 0:
        return eager_attention(q, k, v, is_causal=is_causal)
    block_mask = _causal_blocks(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    out = _flex(*_batch_and_heads(q, k, v), block_mask=block_mask, enable_gqa=kv_group(q, k) > 1)
    return out.reshape(q.shape)


_flex = compile_each_shape(flex_attention)


@functools.lru_cache(maxsize=8)
def _causal_blocks(q_len: int, k_len: int, device: torch.device) -> BlockMask:
    """Make the causal block mask, once per shape as in a training run."""
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, q_len, k_len, device=str(device))


def _batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape each to (batch, heads, seq, head_dim). Without grouped-query attention all leading dims become the
    batch."""
    if q.ndim == 4:
        return q, k, v
    grouped = kv_group(q, k) > 1
    q4, k4, v4 = (x.reshape(-1, x.shape[-3] if grouped else 1, *x.shape[-2:]) for x in (q, k, v))
    return q4, k4, v4


def _requires_its_backward(device: str) -> str | None:
    return None if device == "cuda" else "PyTorch's FlexAttention has no backward pass on CPU"


for _name, _called, _target, _memory, _workspace, _requires in (
    ("sdpa", "SDPA", sdpa, accounting.sdpa_peak, workspace.sdpa_workspace, ()),
    ("sdpa_math", "SDPA's math kernel", MATH, accounting.sdpa_math_peak, Implementation.workspace, ()),
    ("sdpa_flash", "SDPA's flash kernel", FLASH, accounting.sdpa_flash_peak, workspace.flash_workspace, ()),
    (
        "sdpa_efficient",
        "SDPA's memory-efficient kernel",
        EFFICIENT,
        accounting.sdpa_efficient_peak,
        workspace.efficient_workspace,
        (requires_cuda,),
    ),
    (
        "sdpa_cudnn",
        "SDPA's cuDNN kernel",
        CUDNN,
        accounting.sdpa_flash_peak,
        workspace.cudnn_workspace,
        (requires_cuda,),
    ),
    (
        "flex",
        "FlexAttention",
        flex,
        accounting.flex_peak,
        Implementation.workspace,
        (_requires_its_backward, requires_compiler),
    ),
):
    register(
        "attention",
        _name,
        _target,
        memory=_memory,
        workspace=_workspace,
        time=Race("eager"),
        requires=_requires,
        tested_briefly=True,
        called=_called,
    )

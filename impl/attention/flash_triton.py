"""FlashAttention-2 in Triton kernels, forward and backward: no quadratic memory anywhere.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. This file launches the
kernels, which are in `triton_kernels`. Each element of a gradient is summed by a single program, so results are
deterministic. On CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), for correctness only.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from impl.attention import triton_kernels
from impl.attention.accounting import flash_triton_peak
from impl.attention.contract import check_inputs, kv_group
from impl.attention.triton_configurations import CHIPS, HALF, configuration, nearest_arithmetic, prune, tiles
from impl.autograd import FirstDerivative
from impl.interpreting import requires_no_interpreter, requires_triton
from shardmark.api import Race, Unsupported, register

MAX_HEAD_DIM = 128
ALIGNMENT = 16
"""A tensor descriptor (TMA) needs addresses and strides that are multiples of this many bytes."""

MANY_ROWS = 2**17
"""Rows over all programs above which a kernel keeps every multiprocessor busy several times over."""

PRECISIONS = {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}
"""Triton's name for each value of `torch.get_float32_matmul_precision()`."""


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal)`; shapes, dtypes and errors: `impl.attention.Attention`.

    Takes float32, float16 and bfloat16, and head dims that are multiples of 8 up to 128; Unsupported for others.
    float32 products follow `torch.get_float32_matmul_precision()`, as PyTorch's own do. Saves q, k, v, the output and
    one log-sum-exp (..., q_len), natural log, in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_inputs(q, k, v)
        _check_supported(q)
        out, lse = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients of q, k and v; the probabilities are recomputed tile by tile from the log-sum-exp."""
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        compute = functools.partial(_backward, ctx.is_causal, needs_kv)
        return *FirstDerivative.apply("FlashAttention", compute, *ctx.saved_tensors, grad_out), None


def _check_supported(q: Tensor) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"flash_triton takes float32, float16 and bfloat16, got {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD_DIM:
        raise Unsupported(f"flash_triton takes head dims of 8, 16, 24 ... {MAX_HEAD_DIM}, got {q.shape[-1]}")
    interpreted = q.device.type == "cpu" and knobs.runtime.interpret
    if q.device.type != "cuda" and not interpreted:
        raise Unsupported(f"flash_triton takes tensors on CUDA, or on CPU with TRITON_INTERPRET=1, got {q.device}")
    if not interpreted and torch.cuda.get_device_capability(q.device) < (8, 0):
        raise Unsupported("flash_triton takes a CUDA device of compute capability 8.0 or more")


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    if q.numel() == 0:
        return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    launch = _Launch(q, k, is_causal)
    out = launch.result(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    launch("attention_forward", q=q, k=k, v=v, out=out, lse=lse)
    return out.to(q.dtype), lse


def _backward(
    is_causal: bool, needs_kv: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, and of k and v if those are needed. The first kernel computes `delta`, the second reads it."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    launch = _Launch(q, k, is_causal)
    grad_q, delta = launch.result(q), torch.empty_like(lse)
    launch("attention_backward_q", q=q, k=k, v=v, out=out, grad_out=grad_out, grad_q=grad_q, lse=lse, delta=delta)
    if not needs_kv:
        return grad_q.to(q.dtype), None, None
    grad_k, grad_v = launch.result(k), launch.result(v)
    operands = {"q": q, "k": k, "v": v, "grad_out": grad_out, "grad_k": grad_k, "grad_v": grad_v}
    launch("attention_backward_kv", **operands, lse=lse, delta=delta)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class _Launch:
    """The sizes and dtypes that the kernels of one call share. Calling it launches a kernel."""

    def __init__(self, q: Tensor, k: Tensor, is_causal: bool) -> None:
        self.heads = q.shape[-3] if q.ndim > 2 else 1
        self.batch = math.prod(q.shape[:-3])
        self.group = kv_group(q, k)
        self.q_len, self.k_len, self.head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
        self.columns = max(16, triton.next_power_of_2(self.head_dim))
        self.is_causal = is_causal
        self.chip = chip_of(q.device)
        self.arithmetic = HALF if q.dtype.itemsize == 2 else float32_arithmetic()
        # The interpreter truncates to bfloat16 where the hardware rounds, so the interpreter computes in float32.
        self.dtype = torch.float32 if q.dtype == torch.bfloat16 and knobs.runtime.interpret else q.dtype

    def result(self, like: Tensor) -> Tensor:
        """An uninitialized tensor for a kernel to fill."""
        return torch.empty(like.shape, dtype=self.dtype, device=like.device)

    def __call__(self, kernel: str, *, lse: Tensor, delta: Tensor | None = None, **tensors: Tensor) -> None:
        """Launch a kernel on its operands."""
        arithmetic = nearest_arithmetic(kernel, self.arithmetic, self.chip, self.columns)
        tma = self.chip >= 90 and arithmetic in (HALF, "tf32")  # the other arithmetics load rows in chunks
        kv_heads = self.heads // self.group
        # one program per BLOCK_N keys; the other kernels: per BLOCK_M queries
        per_key = kernel == "attention_backward_kv"
        length, block, programs = (self.k_len, "BLOCK_N", kv_heads) if per_key else (self.q_len, "BLOCK_M", self.heads)
        operands = {
            name: self._operand(x, kv_heads if name[-1] in "kv" else self.heads, tma) for name, x in tensors.items()
        }
        launch = _tuned(kernel, arithmetic, self.chip, self.columns)[
            lambda meta: (triton.cdiv(length, meta[block]) * self.batch * programs,)
        ]
        with torch.cuda.device_of(lse):  # Triton launches on the current device
            launch(
                **operands,
                lse=lse,
                **({} if delta is None else {"delta": delta}),
                heads=self.heads,
                group=self.group,
                q_len=self.q_len,
                k_len=self.k_len,
                scale=math.log2(math.e) / math.sqrt(self.head_dim),
                q_bucket=triton.next_power_of_2(self.q_len),
                rows_bucket=min(triton.next_power_of_2(length * self.batch * programs), MANY_ROWS),
                IS_CAUSAL=self.is_causal,
                HEAD_DIM=self.head_dim,
                COLUMNS=self.columns,
                PRECISION="tf32" if arithmetic == HALF else arithmetic,  # 16-bit operands have only one precision
                TMA=tma,
            )

    def _operand(self, x: Tensor, heads: int, tma: bool) -> TensorDescriptor | tuple[Tensor, int, int, int]:
        """`x` as (batch, heads, seq, head_dim), in the form that the kernels read; copied only where they cannot."""
        x = x.to(self.dtype).reshape(self.batch, heads, *x.shape[-2:])
        if tma:
            return TensorDescriptor(*described(x), [1, 1, 1, 16])  # the configuration sets the rows
        x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
        return (x, *x.stride()[:3])


def described(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """The (batch, heads, seq, head_dim) tensor, copied where a tensor descriptor cannot describe it; its shape and
    strides for one."""
    x = x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)
    # The stride of a dimension of size 1 has no meaning and may be any number, so it is replaced by a valid one.
    strides = [x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x, list(x.shape), [*strides[:3], 1]


def is_readable(x: Tensor) -> bool:
    """True if a tensor descriptor can describe `x`."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    aligned = all(step > 0 and step * x.itemsize % ALIGNMENT == 0 for step in steps)
    return aligned and x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0


@functools.cache
def _tuned(kernel: str, arithmetic: str, chip: int, columns: int) -> Any:
    """The kernel with its configurations; Triton's autotuner times them once for each size and takes the fastest.

    The size is how long a program's loop is, and how many programs there are to fill the device.
    """
    choices = [configuration(tile, arithmetic) for tile in tiles(kernel, arithmetic, chip, columns)]
    if knobs.runtime.interpret:
        choices = choices[:1]  # times mean nothing in the interpreter
    tune = triton.autotune(
        choices,
        key=["q_bucket", "rows_bucket", "IS_CAUSAL", "HEAD_DIM"],
        prune_configs_by={"early_config_prune": prune},
    )
    return tune(getattr(triton_kernels, kernel))


@functools.cache
def chip_of(device: torch.device) -> int:
    """The compute capability, of `CHIPS`, whose tables are for `device`; for the interpreter, Hopper's."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    # 12.x, Blackwell for workstations, has neither Blackwell's tensor memory nor Hopper's shared memory.
    return 80 if capability >= 120 else max((known for known in CHIPS if known <= capability), default=CHIPS[0])


def float32_arithmetic() -> str:
    """The precision of PyTorch's own float32 products, by either of its two settings, as Triton names it."""
    try:
        return PRECISIONS[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by the newer API, and then only that API can read it
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


register(
    "attention",
    "flash_triton",
    FlashAttentionTriton,
    memory=flash_triton_peak,
    time=Race("sdpa"),
    requires=(requires_triton,),
    requires_to_measure=(requires_no_interpreter,),
    slack=1.01,  # it holds inputs, outputs, gradients and one or two values a row, and nothing else
    called="FlashAttention in Triton",
)

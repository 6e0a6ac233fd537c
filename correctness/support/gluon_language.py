"""Gluon's and Triton's language on CPU, as far as attention's kernels use it, for `gluon_emulator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from correctness.support.gluon_memory import Barrier, Block, Pointer, Shared, Stages, block

if TYPE_CHECKING:
    from correctness.support.gluon_emulator import Program


class Language:
    """`gl` and `tl`: blocks are tensors, scalars are Python's; layouts are None."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    static_range, exp2, log2, expand_dims, sum = range, torch.exp2, torch.log2, torch.unsqueeze, torch.sum

    def __init__(self, program: Program) -> None:
        self.program = program
        self.warp_specialize = program.warp_specialize
        for name in ("NVMMADistributed", "NVMMAShared", "DotOperand", "Blocked", "Slice", "SwizzledShared"):
            setattr(self, f"{name}Layout", lambda *_: None)

    def program_id(self, axis: int) -> int:
        return self.program.index

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            return Barrier() if len(shape) == 1 else Stages(Barrier() for _ in range(shape[0]))
        return Shared(self.program, *(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))

    def arange(self, start: int, end: int, layout: None = None) -> Block:
        return block(torch.arange(start, end))

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: None = None) -> Block:
        return block(torch.full(shape, value, dtype=dtype))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: None = None) -> Block:
        return self.full(shape, 0, dtype)

    def convert_layout(self, x: Block, layout: None) -> Block:
        return x

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x if isinstance(x, int) else x.to(dtype)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y

    def minimum(self, x: int, y: int) -> int:
        return min(x, y)

    def maximum(self, x: Block, y: Block) -> Tensor:
        return torch.fmax(x, y)  # as on GPUs, NaN loses

    def max(self, x: Block, axis: int) -> Tensor:
        return torch.where(x.isnan(), -torch.inf, x).amax(axis)

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: float = torch.nan) -> Block:
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        pointer.store(value, mask)

    def atomic_add(self, pointer: Pointer, value: Tensor, sem: str) -> None:
        pointer.memory.index_add_(0, pointer.offset.reshape(-1), value.reshape(-1))

    def inline_asm_elementwise(self, *_: Any, **__: Any) -> int:
        return 0  # the kernels' only one, a zero that the compiler does not know

"""Values of a kernel that `gluon_emulator` runs: blocks in registers, pointers, tensor descriptors, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from correctness.support.gluon_emulator import Program

Action = Callable[[], Any]


class Block(Tensor):
    """A tensor in registers."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """A pointer, or a block of pointers, into a tensor's memory; no access is out of that memory."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """A pointer to the first element."""
        length = x.untyped_storage().nbytes() // x.itemsize
        return cls(x.detach().as_strided((length,), (1,), 0), x.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Tensor | None, other: float) -> Block:
        values = torch.full(self.offset.shape, other, dtype=self.memory.dtype)
        seen = self._seen(mask)
        values[seen] = self.memory.index_select(0, self.offset[seen])
        return block(values)

    def store(self, value: Tensor, mask: Tensor | None) -> None:
        seen = self._seen(mask)
        self.memory.index_copy_(0, self.offset[seen], value[seen])

    def _seen(self, mask: Tensor | None) -> Tensor:
        return torch.ones(()).bool().expand(self.offset.shape) if mask is None else mask.expand(self.offset.shape)


class Descriptor:
    """A tensor descriptor: tiles of a tensor with any strides."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.x = host.base.detach().as_strided(host.shape, host.strides)
        self.dtype, self.layout, self.block_type = self.x.dtype, None, SimpleNamespace(shape=list(host.block_shape))

    def box(self, place: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tile at `place` that is inside of the tensor: in the tensor, and in the tile."""
        assert min(place) >= 0
        sizes = zip(place, self.block_type.shape, self.x.shape, strict=True)
        lengths = [max(0, min(block, size - first)) for first, block, size in sizes]
        inside = tuple(slice(first, first + length) for first, length in zip(place, lengths, strict=True))
        return inside, tuple(slice(length) for length in lengths)


class Shared:
    """Shared memory as each of PTX's proxies sees it: threads use the generic one, matrix units and TMA the other.

    A thread's stores reach the asynchronous proxy at its next fence.
    """

    def __init__(self, program: Program, generic: Tensor, asynchronous: Tensor) -> None:
        self.program, self.generic, self.asynchronous = program, generic, asynchronous

    def store(self, value: Block) -> None:
        assert value.shape == self.generic.shape and value.dtype == self.generic.dtype
        self.generic.copy_(value)
        self.program.partition.unfenced.append(lambda: self.asynchronous.copy_(self.generic))

    def load(self, layout: None = None) -> Block:
        return block(self.generic.clone())

    def index(self, stage: int) -> Shared:
        return self._view(lambda x: x[stage])

    def slice(self, start: int, length: int) -> Shared:
        return self._view(lambda x: x[start : start + length])

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(lambda x: x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda x: x.permute(order))

    def _view(self, view: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(self.program, view(self.generic), view(self.asynchronous))


class Barrier:
    """An mbarrier: a phase is over when `count` arrivals and the bytes that they expect have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.num_bytes = self.phase = 0
        self.copies: list[Action] = []

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.pending -= arrivals
        self.num_bytes += num_bytes
        assert self.pending >= 0, "more arrivals than a barrier's count"
        if self.pending == self.num_bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def has_passed(self, parity: int) -> bool:
        """Whether the last phase that is over has the parity; copies that a waiting partition needs end now."""
        if self.phase % 2 == parity and self.pending == 0:
            end_all(self.copies)
        return self.phase % 2 != parity


class Stages(list):
    """Several barriers."""

    def index(self, stage: int) -> Any:  # type: ignore[override]
        return self[stage]


def end_all(started: list[Action], but: int = 0) -> None:
    """Do what was started, in order, but for the last few."""
    while len(started) > but:
        started.pop(0)()

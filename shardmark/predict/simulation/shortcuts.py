"""Shortcuts where PyTorch repeats the same work for each rank of a group or for each result of an operator, and where a
tensor would be larger than this machine's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

MOST_OF_A_BUCKET = 2**32
"""Bytes of a bucket of DDP's first step, in which PyTorch puts all gradients into one."""


@contextmanager
def shortcuts() -> Iterator[None]:
    """Let PyTorch's FSDP and DTensor take the shortcuts in the block."""
    shorter: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (_fsdp_param, "_chunk_with_empty", lambda own: _Pieces),
        (_sharding_prop, "_propagate_use_strided_shard_flag", _where_strided),
        (dist, "_compute_bucket_assignment_by_size", _in_several_buckets),
    ]
    with ExitStack() as stack:
        for owner, name, of in shorter:
            if hasattr(owner, name):  # they only save time, and not every PyTorch has these functions
                stack.enter_context(patch.object(owner, name, of(getattr(owner, name))))
        yield


class _Pieces(Sequence[Tensor]):
    """The pieces of a tensor along a dimension, each made on demand: of 100,000 a rank reads two."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        index = range(self._count)[index]  # IndexError past the last one: a loop ends there
        start, end = index * self._size, min((index + 1) * self._size, self._tensor.size(self._dim))
        return self._tensor.narrow(self._dim, start, end - start) if start < end else self._tensor.new_empty(0)


def _in_several_buckets(assign: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's buckets of the first step. All of them are allocated together, so their bytes are those of one."""

    def assigned(tensors: Sequence[Tensor], limits: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return assign(tensors, [min(limit, MOST_OF_A_BUCKET) for limit in limits], *args, **kwargs)

    return assigned


def _where_strided(propagate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """DTensor's correction of strided shards, which looks at all arguments of an operator again for each result."""
    looked_at: list[Any] = [None, False]

    def propagated(strategy: Any, schema: Any) -> None:
        if schema is not looked_at[0]:
            placements = (placement for spec in schema.args_spec for placement in spec.placements)
            looked_at[:] = schema, any(isinstance(placement, _StridedShard) for placement in placements)
        if looked_at[1]:
            propagate(strategy, schema)

    return propagated

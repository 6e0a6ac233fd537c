"""A shard as torch.distributed.checkpoint takes it: boxes of the whole tensor, each at its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Pieces:
    """What this rank has of a tensor of that size: boxes of it by their offsets. DCP asks for what it has to know."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: dict[tuple[int, ...], Tensor]

    def size(self) -> torch.Size:
        """As a tensor tells it."""
        return self.shape

    def __create_write_items__(self, name: str, pieces: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(box), self.shape),
            )
            for chunk, box in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes.items()]


def pieces(shard: Tensor, shape: torch.Size, interval: tuple[int, int]) -> Pieces:
    """A shard, one-dimensional, as boxes of the whole; they share its memory."""
    found, at = {}, 0
    for offsets, sizes in boxes(shape, *interval):
        found[offsets] = shard.detach()[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
    return Pieces(shape, shard.dtype, found)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `begin` to `end` of a tensor in order, as few boxes one after the other: offsets and sizes of each."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        first = last = begin // row
        parts = [(first, begin, end)]
    else:
        parts = [(first - 1, begin, first * row)]
        if first < last:
            parts.append((first, first * row, last * row))
        parts.append((last, last * row, end))
    for at, low, high in parts:
        if high - low and (high - low) % row == 0:
            yield (at, *(0 for _ in shape[1:])), ((high - low) // row, *shape[1:])
        else:
            for offsets, sizes in boxes(shape[1:], low - at * row, high - at * row):
                yield (at, *offsets), (1, *sizes)


class SavePlanner(DefaultSavePlanner):
    """torch's, that knows pieces."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written: a box of pieces, or anything that is not in pieces."""
        found = _look_up(self.state_dict, index)
        return super().lookup_object(index) if found is None else found


class LoadPlanner(DefaultLoadPlanner):
    """torch's, that knows pieces."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """torch's would take pieces apart."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is read into: a box of pieces, or a whole tensor."""
        found = _look_up(self.state_dict, index)
        return super().lookup_tensor(index) if found is None else found


def _look_up(state: dict[str, Any], index: MetadataIndex) -> Tensor | None:
    entry = state[index.fqn]
    if not isinstance(entry, Pieces):
        return None
    assert index.offset is not None
    return entry.boxes[tuple(index.offset)]

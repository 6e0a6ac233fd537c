"""A shard in the form that torch.distributed.checkpoint (DCP) saves and loads: boxes of the full tensor.

A shard is a run of elements of the flattened parameter. DCP wants rectangular boxes, each with its offset in every
dimension. Elements 2 to 7 of a (4, 3) parameter, for example, are three boxes: one element, a row, and two elements.
"""

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
    """This rank's boxes, by their offsets in a tensor of shape `shape`; DCP calls these methods."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: dict[tuple[int, ...], Tensor]

    def size(self) -> torch.Size:
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
    """A shard, which holds that interval of the flattened tensor, as boxes that share its memory."""
    flat, found, at = shard.detach().view(-1), {}, 0
    for offsets, sizes in boxes(shape, *interval):
        found[offsets] = flat[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
    return Pieces(shape, shard.dtype, found)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `begin` up to (not including) `end` of a flattened tensor, as few boxes: offsets and sizes of each.

    >>> list(boxes((4, 3), 2, 8))
    [((0, 2), (1, 1)), ((1, 0), (1, 3)), ((2, 0), (1, 2))]
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # complete rows: from first to before last
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
    """torch's planner, extended by `Pieces`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = _look_up(self.state_dict, index)
        return super().lookup_object(index) if found is None else found


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, extended by `Pieces`."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # torch's own would flatten what the state dict holds, and so take `Pieces` apart.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = _look_up(self.state_dict, index)
        return super().lookup_tensor(index) if found is None else found


def _look_up(state: dict[str, Any], index: MetadataIndex) -> Tensor | None:
    entry = state[index.fqn]
    if not isinstance(entry, Pieces):
        return None
    assert index.offset is not None
    return entry.boxes[tuple(index.offset)]

"""Checkpoints of a sharded model and its optimizer, saved on any number of ranks and loaded on any other.

    save("step-1000", model, optimizer)
    load("step-1000", model, optimizer)

They are torch.distributed.checkpoint's, with the names and shapes of the module as it was: whatever reads those reads
these. Each rank writes and reads its own part alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from impl.fsdp.sharded import FullyShardedDataParallel

_SHARDED, _SHARED, _GROUPS = "optimizer.sharded", "optimizer.shared", "optimizer.param_groups"


def save(directory: str | Path, model: FullyShardedDataParallel, optimizer: Optimizer | None = None) -> None:
    """Write what every rank has. All ranks call; ValueError where `directory` exists.

    It has that name when it is complete, and another until then: an interrupted save leaves no half of one.
    """
    directory, group = Path(directory), model.process_group
    if directory.exists():
        raise ValueError(f"{directory} exists already, and a checkpoint is written once")
    partial, first = directory.with_name(f"{directory.name}.partial"), dist.get_rank(group) == 0
    dist.barrier(group)  # each has looked before one writes
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    state = _model_state(model) | (_optimizer_state(model, optimizer) if optimizer else {})
    try:
        dcp.save(state, checkpoint_id=partial, planner=_Save(flatten_state_dict=False), process_group=group)
    except CheckpointException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if first:
        partial.rename(directory)
    dist.barrier(group)


def load(directory: str | Path, model: FullyShardedDataParallel, optimizer: Optimizer | None = None) -> None:
    """Read this rank's part of everything. All ranks call.

    ValueError, in one line and before anything is changed, for a directory that holds no complete checkpoint, one of
    another model, or one of an optimizer with other settings or other parameters in a group; their order may differ.
    """
    metadata = _complete(Path(directory))
    state = _model_state(model)
    _check_same(Path(directory), metadata, state)
    moments: dict[str, dict[nn.Parameter, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        if _GROUPS not in metadata.state_dict_metadata:
            raise ValueError(f"{directory} holds no optimizer's state")
        groups = _read(directory, model, {_GROUPS: None})[_GROUPS]
        _check_same_groups(Path(directory), model, optimizer, groups)
        moments = _empty_moments(model, metadata, state)
    _read(directory, model, state)
    if optimizer is not None:
        _put(optimizer, moments, groups)


def _read(directory: str | Path, model: FullyShardedDataParallel, state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state`, and give it back."""
    planner = _Load(flatten_state_dict=False)
    dcp.load(state, checkpoint_id=directory, planner=planner, process_group=model.process_group)
    return state


@dataclass(frozen=True)
class Pieces:
    """What this rank has of a tensor of that size: boxes of it by their offsets. DCP asks for what it has to know."""

    shape: torch.Size
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


class _Save(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = _look_up(self.state_dict, index)
        return super().lookup_object(index) if found is None else found


class _Load(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
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


def _parameters(model: FullyShardedDataParallel) -> Iterator[tuple[str, nn.Parameter, torch.Size, tuple[int, int]]]:
    """Each parameter with its name, its whole shape, and which of its elements are this rank's."""
    names = {p: name for name, p in model.module.named_parameters()}
    for unit in model.units:
        for flat in unit.flats:
            for parameter, shape, interval in zip(flat.parameters, flat.shapes, flat.intervals(), strict=True):
                yield names[parameter], parameter, shape, interval


def _pieces(shard: Tensor, shape: torch.Size, interval: tuple[int, int]) -> Pieces:
    """A shard, one-dimensional, as boxes of the whole; they share its memory."""
    found, at = {}, 0
    for offsets, sizes in boxes(shape, *interval):
        found[offsets] = shard.detach()[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
    return Pieces(shape, found)


def _model_state(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Parameters in pieces, a tied one once, and buffers."""
    tensors = model.module.state_dict()
    buffers = {name: tensors[name] for name, _ in model.module.named_buffers() if name in tensors}
    return {name: _pieces(p, shape, own) for name, p, shape, own in _parameters(model)} | buffers


def _optimizer_state(model: FullyShardedDataParallel, optimizer: Optimizer) -> dict[str, Any]:
    """Each tensor of the optimizer's state by its key and its parameter's name, and the groups' settings."""
    state: dict[str, Any] = {}
    names = {}
    for name, parameter, shape, own in _parameters(model):
        names[parameter] = name
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                state[f"{_SHARDED}.{key}.{name}"] = _pieces(value, shape, own)
            else:
                state[f"{_SHARED}.{key}.{name}"] = value
    state[_GROUPS] = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return state


def _empty_moments(
    model: FullyShardedDataParallel, metadata: Metadata, state: dict[str, Any]
) -> dict[str, dict[nn.Parameter, Tensor]]:
    """Room for the optimizer's state that is in the checkpoint, put into `state` under its names there."""
    parameters = {name: (p, shape, own) for name, p, shape, own in _parameters(model)}
    moments: dict[str, dict[nn.Parameter, Tensor]] = {}
    for entry, stored in metadata.state_dict_metadata.items():
        if not entry.startswith((_SHARDED, _SHARED)) or not isinstance(stored, TensorStorageMetadata):
            continue
        key, name = entry.split(".", 3)[2:]
        parameter, shape, own = parameters[name]
        if entry.startswith(_SHARDED):
            tensor = torch.empty_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
            state[entry] = _pieces(tensor, shape, own)
        else:
            state[entry] = tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        moments.setdefault(key, {})[parameter] = tensor
    return moments


def _put(optimizer: Optimizer, moments: dict[str, dict[nn.Parameter, Tensor]], groups: list[dict[str, Any]]) -> None:
    """Give the optimizer its state and the groups' settings, in its own order of parameters."""
    order = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    of: dict[int, dict[str, Tensor]] = {}
    for key, tensors in moments.items():
        for parameter, tensor in tensors.items():
            of.setdefault(order[parameter], {})[key] = tensor
    numbered = [
        saved | {"params": [order[p] for p in own["params"]]}
        for saved, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": of, "param_groups": numbered})


def _check_same_groups(
    directory: Path, model: FullyShardedDataParallel, optimizer: Optimizer, groups: list[dict[str, Any]]
) -> None:
    """ValueError where the checkpoint's groups have other settings, or other parameters, than the optimizer's."""
    names = {p: name for name, p, _, _ in _parameters(model)}
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{directory} is of another optimizer: {len(groups)} parameter groups there and "
            f"{len(optimizer.param_groups)} here"
        )
    for i, (saved, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for what, there, here in (
            ("setting", set(saved), set(own)),
            ("parameter", set(saved["params"]), {names[p] for p in own["params"]}),
        ):
            if other := sorted(there ^ here):
                where = "there" if other[0] in there else "here"
                raise ValueError(
                    f"{directory} is of another optimizer: group {i} has the {what} {other[0]!r} only {where}"
                )


def _complete(directory: Path) -> Metadata:
    """What the checkpoint holds; ValueError where not all of it is there."""
    if not (directory / ".metadata").is_file():
        raise ValueError(f"{directory} holds no complete checkpoint: it has no .metadata")
    metadata = dcp.FileSystemReader(directory).read_metadata()
    for place in (metadata.storage_data or {}).values():
        file = directory / place.relative_path
        if not file.is_file() or file.stat().st_size < place.offset + place.length:
            raise ValueError(f"{directory} holds no complete checkpoint: {file.name} is missing or cut off")
    return metadata


def _check_same(directory: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """ValueError that names the first parameter or buffer which the checkpoint and the model do not share."""
    stored: dict[str, Any] = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith((_SHARDED, _SHARED))
    }
    mine = {name: tuple(entry.shape) for name, entry in state.items()}
    for name in mine | stored:
        if mine.get(name) != stored.get(name):
            raise ValueError(
                f"{directory} is of another model: {name!r} is {stored.get(name, 'missing')} there and "
                f"{mine.get(name, 'missing')} here"
            )

"""Checkpoints of a sharded model and its optimizer, saved on any number of ranks and loaded on any other.

    save("step-1000", model, optimizer)
    load("step-1000", model, optimizer)

They have the format of torch.distributed.checkpoint, with the names and shapes of the unsharded module, so whatever
reads that format reads them. Each rank writes and reads only its own shards.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from impl.distributed import of_every_rank
from impl.fsdp.checkpoint_boxes import LoadPlanner, Pieces, SavePlanner, pieces
from impl.fsdp.sharded import FullyShardedDataParallel

T = TypeVar("T")

_SHARDED, _SHARED, _GROUPS = "optimizer.sharded", "optimizer.shared", "optimizer.param_groups"


def save(directory: str | Path, model: FullyShardedDataParallel, optimizer: Optimizer | None = None) -> None:
    """Write the shards of every rank to `directory`. All ranks call.

    The files are written to `<directory>.partial`, which is renamed when it is complete. A save that fails removes it;
    one that is killed leaves it for the next save to remove. Raises the same on every rank: ValueError where
    `directory` exists or is not one directory for all ranks, RuntimeError where it cannot be written.
    """
    directory, group = Path(directory), model.process_group
    partial, first = directory.with_name(f"{directory.name}.partial"), dist.get_rank(model.process_group) == 0
    _on_every_rank(group, lambda: _check_absent(directory))
    try:
        _on_every_rank(group, lambda: first and _make_empty(partial))
        state = _on_every_rank(group, lambda: _state_to_save(partial, model, optimizer))
        with _in_one_line(f"{directory} cannot be written"):
            dcp.save(state, checkpoint_id=partial, planner=SavePlanner(flatten_state_dict=False), process_group=group)
        _on_every_rank(group, lambda: first and partial.rename(directory))
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(directory: str | Path, model: FullyShardedDataParallel, optimizer: Optimizer | None = None) -> None:
    """Read this rank's shards. All ranks call.

    Raises in one line, the same on every rank and before anything is changed: ValueError where `directory` holds no
    complete checkpoint, one of a model with other names, shapes or dtypes, or one of an optimizer with other settings
    or other parameters in a group (their order may differ); RuntimeError where its files cannot be read. Until all of
    them are read, a second copy of this rank's shards is in memory.
    """
    directory, group = Path(directory), model.process_group
    metadata, state = _on_every_rank(group, lambda: _matching_state(directory, model, optimizer))
    read = {name: _empty_like(value) for name, value in state.items()}
    groups: list[dict[str, Any]] = []
    moments: dict[nn.Parameter, dict[str, Tensor]] = {}
    if optimizer is not None:
        groups = _read(directory, model, {_GROUPS: None})[_GROUPS]
        _on_every_rank(group, lambda: _check_same_groups(directory, model, optimizer, groups))
        moments = _empty_moments(model, metadata, read)
    _read(directory, model, read)
    model.sharding.wait_for_host_memory()  # a forward may still be copying from it
    for name, value in state.items():
        for own, new in zip(_tensors(value), _tensors(read[name]), strict=True):
            own.copy_(new)
    if optimizer is not None:
        _load_optimizer(optimizer, moments, groups)


def _on_every_rank(group: dist.ProcessGroup, attempt: Callable[[], T]) -> T:
    """Call `attempt` on every rank; return this rank's result once every rank has one.

    Where some ranks raise, all raise the first one's message: as ValueError if it was one, else as RuntimeError.
    """
    error: BaseException | None = None
    try:
        result = attempt()
    except BaseException as caught:
        error = caught
    failures = of_every_rank(None if error is None else (isinstance(error, ValueError), _line(error)), group)
    if error is not None and not isinstance(error, Exception):
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            is_value, line = failure
            where = "" if all(failures) else f" (on rank {rank} of {len(failures)})"
            raise (ValueError if is_value else RuntimeError)(line + where) from error
    return result


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _check_absent(directory: Path) -> None:
    if directory.exists():
        raise ValueError(f"{directory} exists already, and a checkpoint is written once")


def _make_empty(partial: Path) -> Path:
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
    partial.mkdir(parents=True)
    return partial


def _state_to_save(partial: Path, model: FullyShardedDataParallel, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return this rank's part of the checkpoint. ValueError if it does not see the directory that rank 0 made."""
    if not partial.is_dir():
        raise ValueError(
            f"{partial.parent} is not one directory for all ranks: what rank 0 made there is not to be seen"
        )
    return _model_state(model) | (_optimizer_state(model, optimizer) if optimizer else {})


def _matching_state(
    directory: Path, model: FullyShardedDataParallel, optimizer: Optimizer | None
) -> tuple[Metadata, dict[str, Any]]:
    """Return the checkpoint's metadata and the model's state to read into; ValueError if they differ."""
    metadata, state = _complete(directory), _model_state(model)
    _check_same(directory, metadata, state)
    if optimizer is not None and _GROUPS not in metadata.state_dict_metadata:
        raise ValueError(f"{directory} holds no optimizer's state")
    return metadata, state


def _read(directory: str | Path, model: FullyShardedDataParallel, state: dict[str, Any]) -> dict[str, Any]:
    """Read into the tensors of `state`, and return it."""
    planner = LoadPlanner(flatten_state_dict=False)
    with _in_one_line(f"{directory} cannot be read"):
        dcp.load(state, checkpoint_id=directory, planner=planner, process_group=model.process_group)
    return state


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Raise the first failure that torch.distributed.checkpoint reports, on every rank, as a one-line RuntimeError."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{what}: {_line(failure)} (on rank {rank})") from error


def _empty_like(value: Pieces | Tensor) -> Pieces | Tensor:
    if isinstance(value, Tensor):
        return torch.empty_like(value)
    return replace(value, boxes={offsets: torch.empty_like(box) for offsets, box in value.boxes.items()})


def _tensors(value: Pieces | Tensor) -> Sequence[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value.boxes.values())


def _parameters(model: FullyShardedDataParallel) -> Iterator[tuple[str, nn.Parameter, torch.Size, tuple[int, int]]]:
    """Yield each parameter's name, shard, full shape, and the interval of elements (begin, end) in the shard."""
    for unit in model.units:
        unit.install_shards()  # after a backward that raised, full parameters are in the module
    names = {p: name for name, p in model.module.named_parameters()}
    for unit in model.units:
        for flat in unit.flats:
            for parameter, shape, interval in zip(flat.parameters, flat.shapes, flat.intervals(), strict=True):
                yield names[parameter], parameter, shape, interval


def _names(model: FullyShardedDataParallel, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Name of each parameter; ValueError if the optimizer has one that is not the model's."""
    names = {p: name for name, p, _, _ in _parameters(model)}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p not in names:
            raise ValueError(f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's")
    return names


def _model_state(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Return each parameter as `Pieces` (a tied one once), and the buffers."""
    tensors = model.module.state_dict()
    buffers = {name: tensors[name] for name, _ in model.module.named_buffers() if name in tensors}
    return {name: pieces(p, shape, own) for name, p, shape, own in _parameters(model)} | buffers


def _optimizer_state(model: FullyShardedDataParallel, optimizer: Optimizer) -> dict[str, Any]:
    """Return the tensors of the optimizer's state by key and parameter name, and the groups' settings."""
    state: dict[str, Any] = {}
    names = _names(model, optimizer)
    for name, parameter, shape, own in _parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer's state {key!r} of {name!r} is of type {type(value).__name__}, and tensors alone "
                    "are saved: keep it as one, without dimensions"
                )
            if value.shape == parameter.shape:
                state[f"{_SHARDED}.{key}.{name}"] = pieces(value, shape, own)
            else:
                state[f"{_SHARED}.{key}.{name}"] = value
    state[_GROUPS] = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return state


def _empty_moments(
    model: FullyShardedDataParallel, metadata: Metadata, state: dict[str, Any]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Empty tensors for the optimizer's state in the checkpoint, by parameter and key; `state` gets them by name."""
    parameters = {name: (p, shape, own) for name, p, shape, own in _parameters(model)}
    moments: dict[nn.Parameter, dict[str, Tensor]] = {}
    for entry, stored in metadata.state_dict_metadata.items():
        if not entry.startswith((_SHARDED, _SHARED)) or not isinstance(stored, TensorStorageMetadata):
            continue
        key, name = entry.split(".", 3)[2:]
        parameter, shape, own = parameters[name]
        if entry.startswith(_SHARDED):
            tensor = torch.empty_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
            state[entry] = pieces(tensor, shape, own)
        else:
            state[entry] = tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        moments.setdefault(parameter, {})[key] = tensor
    return moments


def _load_optimizer(
    optimizer: Optimizer, moments: dict[nn.Parameter, dict[str, Tensor]], groups: list[dict[str, Any]]
) -> None:
    """Load state and settings by `load_state_dict`, which numbers parameters in the optimizer's own order."""
    order = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = {order[parameter]: tensors for parameter, tensors in moments.items()}
    numbered = [
        saved | {"params": [order[p] for p in own["params"]]}
        for saved, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def _check_same_groups(
    directory: Path, model: FullyShardedDataParallel, optimizer: Optimizer, groups: list[dict[str, Any]]
) -> None:
    """ValueError if the checkpoint's groups have other settings or other parameters than the optimizer's."""
    names = _names(model, optimizer)
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
    """Return the checkpoint's metadata; ValueError if a file is missing or too short."""
    if not (directory / ".metadata").is_file():
        raise ValueError(f"{directory} holds no complete checkpoint: it has no .metadata")
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except Exception as error:
        raise ValueError(f"{directory} holds no complete checkpoint: its .metadata cannot be read") from error
    for place in (metadata.storage_data or {}).values():
        file = directory / place.relative_path
        if not file.is_file() or file.stat().st_size < place.offset + place.length:
            raise ValueError(f"{directory} holds no complete checkpoint: {file.name} is missing or cut off")
    return metadata


def _check_same(directory: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """ValueError that names the first parameter or buffer that differs between checkpoint and model."""
    stored: dict[str, Any] = {
        name: f"{tuple(entry.size)} of {entry.properties.dtype}"
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith((_SHARDED, _SHARED))
    }
    own = {name: f"{tuple(entry.shape)} of {entry.dtype}" for name, entry in state.items()}
    for name in own | stored:
        if own.get(name) != stored.get(name):
            raise ValueError(
                f"{directory} is of another model: {name!r} is {stored.get(name, 'missing')} there and "
                f"{own.get(name, 'missing')} here"
            )

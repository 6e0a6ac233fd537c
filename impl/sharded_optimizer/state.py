"""Convert optimizer state between this rank's segments and full parameters, which any number of ranks can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Collectives
from impl.distributed import of_every_rank
from impl.sharded_optimizer.shards import Segment, ShardedBucket

State = dict[str, Any]
"""State of one parameter: tensors of its shape, and values that all its elements share, such as the step count."""


def gather_state(
    buckets: Sequence[ShardedBucket], state: Mapping[Tensor, State], group: dist.ProcessGroup, collectives: Collectives
) -> dict[nn.Parameter, State]:
    """All-gather the state of full parameters, on every rank; parameters without state are left out.

    ValueError for a tensor of state that has neither the shape of its segment nor zero dimensions.
    """
    every_rank = of_every_rank([_described(bucket, state) for bucket in buckets], group)
    gathered: dict[nn.Parameter, State] = {}
    for i, bucket in enumerate(buckets):
        shared: dict[int, State] = {}  # key: the parameter's index in the bucket
        for rank in every_rank:
            shared |= rank[i]
        dtypes = {name: dtype for values in shared.values() for name, dtype in values.items() if _is_dtype(dtype)}
        full = {name: _gather(bucket, name, dtypes[name], state, group, collectives) for name in sorted(dtypes)}
        for place, values in sorted(shared.items()):
            p = bucket.parameters[place]
            gathered[p] = {k: full[k][p].clone() if _is_dtype(value) else value for k, value in values.items()}
    return gathered


def split_state(loaded: Mapping[int, State], segment: Segment, index: int) -> State:
    """The segment's part of the full state of the parameter at `index`; tensors are copied."""
    parts = {}
    for name, value in loaded.get(index, {}).items():
        if is_elementwise(name, value, segment.parameter):
            value = value.reshape(-1)[segment.start : segment.stop]
        parts[name] = value.clone() if isinstance(value, Tensor) else value
    return parts


def check_state(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """One-line ValueError if the state does not fit these param groups."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this is no optimizer's state: it has no {key!r}, but {sorted(map(str, state_dict))}")
    check_groups(state_dict, groups)
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in groups for p in group["params"]]
    tensors = [
        (i, p, name, value)
        for i, p in zip(ids, params, strict=True)
        for name, value in state_dict["state"].get(i, {}).items()
        if isinstance(value, Tensor)
    ]
    elementwise = {name for _, p, name, value in tensors if value.dim() and value.shape == p.shape}
    for i, p, name, value in tensors:
        # A value that all elements share has no dimensions. A scalar parameter's state has none, either: hence `name`.
        if value.shape != p.shape and (value.dim() or name in elementwise):
            raise ValueError(
                f"the state is of another model: {name!r} of parameter {i} has shape {tuple(value.shape)}, "
                f"and the parameter {tuple(p.shape)}"
            )


def arguments(group: dict[str, Any]) -> dict[str, Any]:
    """A param group's arguments, such as `lr`: all but its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def check_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """ValueError if the number of groups, or of parameters in one, differs."""
    saved, own = ([len(group["params"]) for group in g] for g in (state_dict["param_groups"], groups))
    if saved != own:
        raise ValueError(f"the state is of another model: its groups have {saved} parameters, the optimizer's {own}")


def is_elementwise(name: str, value: Any, parameter: Tensor) -> bool:
    """Return True if that state of a full parameter has a value for each of its elements."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _described(bucket: ShardedBucket, state: Mapping[Tensor, State]) -> dict[int, State]:
    """Describe the state of this rank's segments by index in the bucket: the dtype of each elementwise tensor, and all
    other values themselves."""
    places = {p: place for place, p in enumerate(bucket.parameters)}
    described: dict[int, State] = {}
    for segment in bucket.segments:
        for name, value in state.get(segment.shard, {}).items():
            entry = described.setdefault(places[segment.parameter], {})
            if isinstance(value, Tensor) and value.shape == segment.shard.shape:
                entry[name] = value.dtype
            elif isinstance(value, Tensor) and value.dim():
                raise ValueError(
                    f"state {name!r} has shape {tuple(value.shape)} where the shard has {tuple(segment.shard.shape)}: "
                    "the optimizer does not treat each element by itself, so its state cannot be put together"
                )
            else:
                entry[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return described


def _gather(
    bucket: ShardedBucket,
    name: str,
    dtype: torch.dtype,
    state: Mapping[Tensor, State],
    group: dist.ProcessGroup,
    collectives: Collectives,
) -> dict[nn.Parameter, Tensor]:
    """All-gather one kind of state of the bucket, by parameter."""
    own = torch.zeros(bucket.size, dtype=dtype, device=bucket.flat.device)
    for segment in bucket.segments:
        if name in state.get(segment.shard, {}):
            own[segment.place : segment.place + segment.shard.numel()].copy_(state[segment.shard][name])
    full = torch.empty(bucket.flat.shape, dtype=dtype, device=own.device)
    collectives.all_gather(full, own, group)
    return bucket.slots(full)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)

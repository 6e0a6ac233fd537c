"""An optimizer that was made before its model was sharded, set right.

    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(before.values())
    fully_shard(model)                                        # gives the model new parameters
    rewire(optimizer, before, dict(model.named_parameters()))
    del before                                                # the full parameters are freed

Without it the optimizer updates what the model no longer uses: nothing trains, nothing is freed, nothing complains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def rewire(optimizer: Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Have `optimizer` hold, for each parameter of `before` that it holds, the one of that name in `after`.

    Its state, if there is any by then, is taken to be the same on every rank: where the new parameter is a DTensor,
    each rank keeps its shard of it, and nothing is communicated. Raises ValueError, and changes nothing, for parameters
    that were not there before, are not there after or changed shape, and for state of another shape than its parameter.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    new: dict[int, Tensor] = {}
    for old in (p for group in optimizer.param_groups for p in group["params"]):
        name = names.get(id(old))
        if name is None:
            raise ValueError(f"the optimizer holds a parameter of shape {tuple(old.shape)} that was not there before")
        if name not in after:
            raise ValueError(f"there is no parameter {name!r} any more")
        if after[name].shape != old.shape:
            raise ValueError(f"{name!r} was of shape {tuple(old.shape)} and is of {tuple(after[name].shape)}")
        new[id(old)] = after[name]
    state = {new[id(old)]: _state(names[id(old)], held, old, new[id(old)]) for old, held in optimizer.state.items()}
    for group in optimizer.param_groups:
        group["params"] = [new[id(old)] for old in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)


def _state(name: str, held: Mapping[str, Any], old: Tensor, new: Tensor) -> dict[str, Any]:
    """A parameter's state as the new one needs it; single numbers, such as the steps done, stay as they are."""
    state = {}
    for key, value in held.items():
        if not isinstance(value, Tensor) or value.numel() == 1 != old.numel():
            state[key] = value
        elif value.shape != old.shape:
            shapes = f"{tuple(value.shape)} where the parameter has {tuple(old.shape)}"
            raise ValueError(f"{key!r} of {name!r} is of shape {shapes}, so there is no telling how to shard it")
        else:
            state[key] = _like(new, value)
    return state


def _like(new: Tensor, value: Tensor) -> Tensor:
    """This rank's shard, which is a copy, so that the whole can go."""
    if not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)

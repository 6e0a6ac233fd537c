"""Repair an optimizer that was made before its model was sharded.

    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(before.values())
    fully_shard(model)                                        # gives the model new parameters
    rewire(optimizer, before, dict(model.named_parameters()))
    del before                                                # the full parameters are freed

Without `rewire` the optimizer updates parameters that the model no longer uses: nothing trains, the full parameters are
never freed, and no error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def rewire(optimizer: Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replace each parameter that `optimizer` holds, one of `before`, by the one of the same name in `after`.

    State that the optimizer has by then must be the same on every rank: where the new parameter is a DTensor, each rank
    takes its shard of it, without communication. Raises ValueError, and changes nothing, for a parameter that is not in
    `before`, is not in `after` or changed its shape, and for state of another shape than its parameter.
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
    """A parameter's state, sharded as the new parameter is; single numbers, such as the step count, are not."""
    state = {}
    for key, value in held.items():
        if not isinstance(value, Tensor) or value.numel() == 1 != old.numel():
            state[key] = value
        elif value.shape != old.shape:
            shapes = f"{tuple(value.shape)} where the parameter has {tuple(old.shape)}"
            raise ValueError(f"{key!r} of {name!r} is of shape {shapes}, so it is not known how to shard it")
        else:
            state[key] = _like(new, value)
    return state


def _like(new: Tensor, value: Tensor) -> Tensor:
    """`value`, sharded as `new` is. The shard is a copy, so that the full tensor can be freed."""
    if not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)

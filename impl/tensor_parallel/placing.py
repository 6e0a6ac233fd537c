"""Parameters on the axis `tp`: cut along a dimension, or whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from impl.distributed import local
from shardmark.api import Unsupported


def cut(parameter: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A DTensor of which each rank has its part along `dim`, as `Tensor.chunk` cuts it: the last one may be smaller.
    Unsupported where a rank would have none."""
    parts = parameter.detach().chunk(mesh.size(), dim)
    if len(parts) < mesh.size():
        raise Unsupported(f"{tuple(parameter.shape)} leaves one of {mesh.size()} ranks no part along dimension {dim}")
    return _placed(parts[mesh.get_local_rank()], parameter, mesh, Shard(dim))


def whole(parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor that every rank has whole."""
    return _placed(parameter.detach(), parameter, mesh, Replicate())


def localized(model: nn.Module) -> dict[str, Placement]:
    """Put each DTensor's local part in its place, as a parameter, for wrappers and optimizers that know no DTensors.
    Tied ones stay one. Returns by name how each is placed, for `joined`. Gradients must be whole, which they are not
    where a sum over ranks is still to be made (`Partial`)."""
    own: dict[DTensor, nn.Parameter] = {}
    placements: dict[str, Placement] = {}
    for owner_name, owner in model.named_modules():
        for name, parameter in [*owner.named_parameters(owner_name, recurse=False)]:
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in own:
                own[parameter] = nn.Parameter(local(parameter).detach(), parameter.requires_grad)
            placements[name] = parameter.placements[0]
            setattr(owner, name.rpartition(".")[2], own[parameter])
    return placements


def joined(parts: Sequence[Tensor], placement: Shard) -> Tensor:
    """The whole parameter, from every rank's part."""
    return torch.cat(list(parts), placement.dim)


def _placed(part: Tensor, parameter: Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> nn.Parameter:
    own = part.clone().contiguous()  # does not keep the whole parameter alive
    shape, stride = parameter.shape, parameter.contiguous().stride()
    made = DTensor.from_local(own, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)

"""Parameters on the axis `tp`: cut along a dimension, or whole on every rank."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

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


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _placed(part: Tensor, parameter: Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> nn.Parameter:
    own = part.clone().contiguous()  # does not keep the whole parameter alive
    shape, stride = parameter.shape, parameter.contiguous().stride()
    made = DTensor.from_local(own, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)

"""A copy of the model on each rank, whose gradients are averaged over the ranks with rows of their own."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from impl.data_parallel import BucketedDataParallel
from shardmark.api import AXES, Race, Share, Unsupported, register


def refuse_but(mesh: DeviceMesh, *taken: str) -> list[str]:
    """Names of the mesh's axes. Unsupported where one of more than one rank is not among those `taken`."""
    names = list(mesh.mesh_dim_names or ())
    for dim, name in enumerate(names):
        if name not in taken and mesh.size(dim) > 1:
            raise Unsupported(f"it takes {', '.join(taken)}, and not {name}")
    return names


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallel over `dp`, in buckets; ranks along `tp` do the same work twice."""
    names = [name for name in refuse_but(mesh, "dp", "tp") if AXES[name] is Share.ROWS]
    return BucketedDataParallel(model, process_group=mesh.get_group(names[0])) if names else model


register("mesh", "replicated", replicated, time=Race("naive"), called="copies of the model")

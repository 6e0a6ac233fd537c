"""Device meshes of calls that come one after the other on the same ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from shardmark.api import Mesh
from shardmark.plugin import WorldsBySize


def multiply(spec: str, forgets: int) -> float:
    """A row-parallel product along tp, whose summands DTensor adds up; that rank has forgotten other meshes before."""
    tp = Mesh.parse(spec).device_mesh("cpu")["tp"]
    if dist.get_rank() == forgets:
        _clear_sharding_prop_cache()
    x = DTensor.from_local(torch.ones(2, 3), tp, [Shard(1)])
    weight = DTensor.from_local(torch.ones(3, 2), tp, [Shard(0)])
    return (x @ weight).full_tensor().sum().item()


def test_a_mesh_has_its_own_groups_whatever_other_ranks_remember(worlds: WorldsBySize) -> None:
    """The axes tp of the two meshes are equal, and have each groups of their own."""
    four = worlds(4)
    for spec in ("dp=2,tp=2", "shard=2,tp=2"):
        assert four.run(multiply, spec, 1, deadline=20) == [24.0] * 4

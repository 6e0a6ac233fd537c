"""Meshes for SimpleFSDP's modes, and a counter of its collectives."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from impl.model.mlp import MLP_SIZES


def mesh_for(mode: str, device: str) -> DeviceMesh:
    """Make a mesh of all ranks; for hybrid sharding, with shards over pairs of ranks."""
    ranks = dist.get_world_size()
    return init_device_mesh(device, (ranks // 2, 2) if mode == "hybrid_shard" else (ranks,))


def ranks_for(mode: str) -> int:
    return 4 if mode == "hybrid_shard" else 2


class Collectives(TorchDispatchMode):
    """Records the collectives that start: count, dtype and number of input elements of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.values: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            if function.name().startswith(f"_c10d_functional::{name}"):
                self.calls[name, str(args[0].dtype).removeprefix("torch.")] += 1
                self.values[name] += args[0].numel()
        return function(*args, **(kwargs or {}))


TINY = MLP_SIZES["mlp-tiny"]


PARAMETERS = 4 + 4 * TINY.layers

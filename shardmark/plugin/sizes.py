"""World sizes and meshes of a run: `--ranks` and `--mesh`."""

from __future__ import annotations

import torch

from shardmark.api.mesh import Mesh
from shardmark.ranks import torchrun
from shardmark.ranks.rank import WorldError, available_cores
from shardmark.ranks.world import available_ranks, check_size


def ranks(value: str | None, device: str) -> list[int]:
    """`--ranks` as numbers; by default torchrun's ranks, else every GPU, else 2 (1 on a single core)."""
    if value is None:
        if torchrun.launched():
            return [torchrun.world_size()]
        return [torch.cuda.device_count() if device == "cuda" else min(2, available_cores())]
    try:
        sizes = [int(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"--ranks takes world sizes such as 2,4, not {value!r}") from None
    for size in [] if torchrun.launched() else sizes:  # torchrun's own may be on many machines
        try:
            check_size(size, device)
        except WorldError as error:
            raise ValueError(f"--ranks {value}: {error}") from None
    return list(dict.fromkeys(sizes))


def meshes(values: list[str]) -> list[Mesh]:
    """`--mesh` as meshes; ValueError, in one line, for what is none."""
    found = []
    for value in dict.fromkeys(values):
        try:
            found.append(Mesh.parse(value))
        except ValueError as error:
            raise ValueError(f"--mesh {value}: {error}") from None
    return found


def contract_ranks(ranks: list[int], device: str) -> list[int]:
    """2, and 3, as an odd number rarely divides shapes; on CUDA the ranks too."""
    if torchrun.launched():
        return ranks
    sizes = {2, 3} if device == "cpu" else {2, 3, *ranks}
    return sorted(size for size in sizes if size <= available_ranks(device))

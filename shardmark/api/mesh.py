"""Meshes of ranks: which axes there are, and what each one does with a batch.

    mesh = Mesh.parse("dp=2,tp=2")  # two copies of the model, each cut over two ranks
    mesh.size                       # 4 ranks; rank 3 is {"dp": 1, "tp": 1}
    mesh.share(batch, rank=3)       # the second half of the rows: ranks along tp see the same ones

The outermost axis comes first: ranks along the last one are neighbours, as in `torch.distributed.device_mesh`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group


class Share(Enum):
    """The share of a batch that ranks along an axis see."""

    ROWS = "rows of their own"
    SLICES = "slices of each row"
    SAME = "the same rows"


AXES = {
    "pp": Share.SAME,  # a stage of the model
    "dp": Share.ROWS,  # a copy of the model
    "shard": Share.ROWS,  # a shard of each parameter, gathered for use
    "cp": Share.SLICES,  # the whole model, for its slice of the context
    "tp": Share.SAME,  # a part of each product
}
"""Every axis that has ranks of its own, and what it does with a batch: the one place that says so."""
EXPERTS = "ep"
"""The axis of experts lies over others: its ranks see tokens of their own, and each has some of the experts."""
EXAMPLE = "dp=2,tp=2"


def data_axes(names: Sequence[str]) -> tuple[str, ...]:
    """The names of those axes along which ranks have tokens of their own."""
    return tuple(name for name in names if AXES[name] is not Share.SAME)


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, the outermost first. `experts` is the size of the axis `ep`, 1 without it."""

    axes: tuple[tuple[str, int], ...]
    experts: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh of a text such as "dp=2,tp=2"; ValueError, in one line, for any other."""
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (each.strip() for each in part.partition("="))
            if name not in (*AXES, EXPERTS):
                raise ValueError(f"it has axes among {', '.join((*AXES, EXPERTS))}, such as {EXAMPLE}, not {part!r}")
            if not re.fullmatch(r"0*[1-9]\d{0,5}", size):
                raise ValueError(f"{name} is a number of ranks from 1 on, not {size!r}")
            if name in found:
                raise ValueError(f"it has {name} twice")
            found[name] = int(size)
        experts = found.pop(EXPERTS, 1)
        mesh = cls(tuple(found.items()), experts)
        if experts > 1:
            mesh.below_experts()
        return mesh

    @property
    def spec(self) -> str:
        """The text that it was parsed from, such as "dp=2,tp=2"."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, with that of `ep`."""
        return dict(self.axes) | ({EXPERTS: self.experts} if self.experts > 1 else {})

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place along each axis."""
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def along(self, share: Share) -> tuple[str, ...]:
        """Names of the axes along which ranks see that share of a batch."""
        return tuple(name for name, _ in self.axes if AXES[name] is share)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Names of the axes along which ranks have tokens of their own: their losses and gradients are added."""
        return data_axes([name for name, _ in self.axes])

    def below_experts(self) -> tuple[str, ...]:
        """Names of the axes that `ep` lies over: the innermost of those with tokens of their own, as many as its size
        takes. ValueError where no axes have that many ranks."""
        below: list[str] = []
        for name in reversed(self.data_axes):
            below.insert(0, name)
            if (ranks := prod(dict(self.axes)[each] for each in below)) >= self.experts:
                if ranks == self.experts:
                    return tuple(below)
                break
        raise ValueError(
            f"ep lies over the innermost of {', '.join(self.data_axes) or 'dp, shard and cp'}: it has as many ranks as "
            f"some of them together, not {self.experts}"
        )

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """The rank's place along those axes together, the outermost first."""
        place, found = self.coordinates(rank), 0
        for name in axes:
            found = found * dict(self.axes)[name] + place[name]
        return found

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Names of the axes along which those ranks have different places."""
        places = [self.coordinates(rank) for rank in ranks]
        return tuple(name for name, _ in self.axes if len({place[name] for place in places}) > 1)

    def ranks(self, axes: Sequence[str]) -> int:
        """Number of ranks along those axes together."""
        return prod(dict(self.axes)[name] for name in axes)

    def share(self, batch: Sequence[Tensor], rank: int) -> tuple[Tensor, ...]:
        """The part of a batch that the rank sees. All tensors are (rows, context, ...)."""
        return self.slices(self._part(batch, 0, self.along(Share.ROWS), rank), rank)

    def slices(self, rows: Sequence[Tensor], rank: int) -> tuple[Tensor, ...]:
        """The rank's slices of the rows that it sees."""
        return self._part(rows, 1, self.along(Share.SLICES), rank)

    def _part(self, batch: Sequence[Tensor], dim: int, axes: Sequence[str], rank: int) -> tuple[Tensor, ...]:
        parts = self.ranks(axes)
        if parts == 1:
            return tuple(batch)
        return tuple(each.tensor_split(parts, dim)[self.index(rank, axes)] for each in batch)

    @property
    def row_groups(self) -> int:
        """Number of groups of ranks that have rows of their own."""
        return self.ranks(self.along(Share.ROWS))

    def row_group(self, rank: int) -> int:
        """The number of the rank's group, from 0 on: ranks with the same rows have the same."""
        return self.index(rank, self.along(Share.ROWS))

    def device_mesh(self, device: str) -> DeviceMesh:
        """The `DeviceMesh` of these axes on the ranks of the world, for `mesh["dp", "tp"]`; `ep` is one more name."""
        known = _device_meshes.setdefault(_get_default_group(), {})
        if (self, device) not in known:  # its groups of ranks are made once
            known[self, device] = _device_mesh(self, device)
        return known[self, device]

    def __str__(self) -> str:
        return "_".join(f"{name}{size}" for name, size in self.sizes.items())


_device_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[Mesh, str], DeviceMesh]] = WeakKeyDictionary()
"""Meshes of each world that this process has been in."""


def _device_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    names, sizes = zip(*mesh.axes, strict=True)
    made = init_device_mesh(device, sizes, mesh_dim_names=names)
    if mesh.experts > 1:
        made[mesh.below_experts()]._flatten(EXPERTS)
    return made

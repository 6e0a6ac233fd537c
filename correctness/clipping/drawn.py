"""Gradients drawn at random: any number of them, of any shapes and dtypes, in any memory, with any placements."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from correctness.clipping.gradients import Clipped, differences, wide
from correctness.support.default_dtype import default_dtype
from impl.distributed import full, local
from shardmark.api import Implementation, Mesh

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Draw:
    """One gradient; with `plain`, it is no DTensor; with `missing`, there is none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    seed: int
    size: float = 1.0
    plain: bool = False
    missing: bool = False
    transposed: bool = False

    @property
    def sums(self) -> bool:
        return any(each.is_partial() for each in self.placements)

    def whole(self) -> Tensor:
        """The gradient of one process: small integers where sums over ranks are to be made, exact in any order."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = [self._part(generator) for _ in range(2 if self.dtype.is_complex else 1)]
        return (torch.complex(*parts) if self.dtype.is_complex else parts[0]).to(self.dtype)

    def _part(self, generator: torch.Generator) -> Tensor:
        if self.sums and self.size:
            return torch.randint(-8, 9, self.shape, generator=generator).double()
        return self.size * torch.randn(self.shape, generator=generator, dtype=torch.float64)

    def on(self, mesh: DeviceMesh) -> nn.Parameter:
        whole = self.whole().to(mesh.device_type)
        if self.plain:
            gradient = whole
        else:
            kept = [Replicate() if each.is_partial() else each for each in self.placements]
            spread = distribute_tensor(whole, mesh, kept, src_data_rank=None)
            own = spread.to_local()
            for dim, each in enumerate(self.placements):
                if each.is_partial("sum") and mesh.get_local_rank(dim):  # the first has the sum, others nothing to add
                    own = torch.zeros_like(own)
            if self.transposed and own.ndim == 2:
                own = own.t().contiguous().t()
            gradient = DTensor.from_local(
                own, mesh, self.placements, run_check=False, shape=spread.shape, stride=spread.stride()
            )
            placed = torch.zeros_like(spread)
        parameter = nn.Parameter(torch.zeros_like(whole) if self.plain else placed)
        parameter.grad = None if self.missing else gradient
        return parameter


KINDS: dict[str, tuple[float, tuple[float, ...]]] = {
    "of_dtensors": (0.0, (2.0, 2.0, 1.0, 3.0)),
    "with_plain_tensors": (0.2, (2.0, 2.0, 1.0, 3.0)),
    "largest": (0.0, (math.inf,)),
}
"""The share of gradients that are no DTensors, and types of the norm."""


@dataclass(frozen=True)
class Example:
    """Gradients, and what they are clipped to."""

    draws: tuple[Draw, ...]
    max_norm: float
    norm_type: float
    around: str = "nothing"
    """One of `AROUND`."""
    again: bool = False
    """A first call comes before, in which every second parameter has a gradient."""
    together: bool = False
    """Gradients of one dtype lie in one buffer, as FSDP2 leaves them."""


AROUND: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "nothing": lambda device: nullcontext(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "no_grad": lambda device: torch.no_grad(),
    "another default dtype": lambda device: default_dtype(torch.bfloat16),
}
"""The caller's blocks round a clip."""


def drawn(seed: int, mesh: Mesh, kind: str) -> Example:
    chooses, (plain, norm_types) = random.Random(f"{seed} {mesh}"), KINDS[kind]
    dtypes = chooses.choice([DTYPES[:1], DTYPES[1:2], DTYPES[1:], DTYPES])
    found = []
    for index in range(chooses.choice([1, 2, 3, 5, 12])):
        shape = tuple(chooses.choice([1, 2, 3, 4, 7, 8]) for _ in range(chooses.choice([0, 1, 1, 2, 2, 3])))
        placements = _placements(chooses, len(shape), mesh)
        found.append(
            Draw(
                shape,
                chooses.choice(dtypes),
                placements,
                seed=1000 * seed + index,
                size=10.0 ** chooses.choice([0, 0, 0, -6, 6]),
                plain=chooses.random() < plain,
                missing=chooses.random() < 0.1,
                transposed=chooses.random() < 0.3,
            )
        )
    if chooses.random() < 0.1:  # as of a part that the loss does not use
        found = [replace(each, size=0.0) for each in found]
    most, norm_type = chooses.choice([0.0, 1e-3, 1.0, 1.0, 1e9, math.inf]), chooses.choice(norm_types)
    # Autocast to bfloat16 refuses to concatenate tensors of float16, and there are none.
    around = chooses.choice([*AROUND, "autocast"])
    return Example(tuple(found), most, norm_type, around, chooses.random() < 0.3, chooses.random() < 0.3)


LARGE = ((701, 401), (262_145,))


def many(count: int, mesh: Mesh, dtype: torch.dtype = torch.float64) -> Example:
    """As many gradients, in float64 two of them large; to leave out any other changes the norm too."""
    chooses = random.Random(f"{count} {mesh}")
    large = LARGE if dtype == torch.float64 else ()
    shapes = [*large, *[(6,)] * (count - len(large))]
    chooses.shuffle(shapes)
    every = [_placements(chooses, len(shape), mesh) for shape in shapes]
    numbered = enumerate(zip(shapes, every, strict=True))
    return Example(tuple(Draw(shape, dtype, places, seed) for seed, (shape, places) in numbered), 1.0, 2.0)


def complex_ones(norm_type: float, mesh: Mesh) -> Example:
    """Complex gradients beside real ones, and no empty part, so that either all ranks refuse them or none does."""
    cut = [Shard(0) for _ in mesh.axes], [Replicate() for _ in mesh.axes]
    dtypes = torch.complex64, torch.complex64, torch.float32
    found = (Draw((8, 3), dtype, tuple(cut[seed % 2]), seed) for seed, dtype in enumerate(dtypes))
    return Example(tuple(found), 1.0, norm_type)


def _placements(chooses: random.Random, dims: int, mesh: Mesh) -> tuple[Placement, ...]:
    """One for each axis. A dimension that the last two cut may be cut by the last one first: FSDP2 cuts so what tensor
    parallelism has cut."""
    found = [_placement(chooses, dims) for _ in mesh.axes]
    *_, axis, last = [None, *found]
    if isinstance(last, Shard) and axis == last and not any(each.is_partial() for each in found):
        found[-2] = chooses.choice([last, _StridedShard(last.dim, split_factor=mesh.axes[-1][1])])
    return tuple(found)


def _placement(chooses: random.Random, dims: int) -> Placement:
    kind = chooses.random()
    if kind < 0.1:
        return Partial(chooses.choice(["sum", "avg"]))
    return Shard(chooses.randrange(dims)) if dims and kind < 0.7 else Replicate()


def clip_drawn_on_rank(
    implementation: Implementation, mesh: Mesh, examples: Sequence[Example], device: str
) -> list[Clipped | None]:
    """Norms are read after the last clip, as training logs them only now and then. On two axes every second example is
    on another mesh. None where complex gradients are an error."""
    kind = torch.device(device).type
    meshes = [mesh.device_mesh(kind)]
    if len(mesh.axes) == 2:
        meshes.append(_with_other_neighbours(mesh, kind))
    clipped = [_clip(implementation, meshes[i % len(meshes)], example) for i, example in enumerate(examples)]
    return [each and Clipped(each[0].item(), each[1]) for each in clipped]


_other_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[Mesh, str], DeviceMesh]] = WeakKeyDictionary()
"""Meshes of each world that this process has been in: their groups of ranks are made once."""


def _with_other_neighbours(mesh: Mesh, kind: str) -> DeviceMesh:
    """A mesh of the same two axes, along which other ranks lie."""
    known = _other_meshes.setdefault(_get_default_group(), {})
    if (mesh, kind) not in known:
        names, sizes = zip(*mesh.axes, strict=True)
        known[mesh, kind] = DeviceMesh(kind, torch.arange(mesh.size).view(sizes[::-1]).T, mesh_dim_names=names)
    return known[mesh, kind]


def _clip(implementation: Implementation, on: DeviceMesh, example: Example) -> tuple[Tensor, list[Tensor]] | None:
    parameters = [draw.on(on) for draw in example.draws]
    if example.together:
        _put_together(parameters)
    if example.again:
        gradients = [parameter.grad for parameter in parameters]
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.zeros_like(parameter) if index % 2 else None
        implementation.watched(parameters, 1.0, example.norm_type)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    try:
        with AROUND[example.around](on.device_type):
            norm = full(implementation.watched(parameters, example.max_norm, example.norm_type))
    except Exception:
        if any(draw.dtype.is_complex for draw in example.draws):
            return None
        raise
    for draw, parameter in zip(example.draws, parameters, strict=True):
        assert (parameter.grad is None) == draw.missing, f"a gradient came or went: {draw}"
    return norm, [full(p.grad).detach().cpu() for p in parameters if p.grad is not None]


def _put_together(parameters: Sequence[nn.Parameter]) -> None:
    """Make the gradients of each dtype views of one buffer."""
    of_dtypes: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            of_dtypes.setdefault(parameter.grad.dtype, []).append(parameter)
    for own in of_dtypes.values():
        parts = [local(p.grad) for p in own if p.grad is not None]
        buffer = torch.cat([part.flatten() for part in parts]).split([part.numel() for part in parts])
        for p, part, view in zip(own, parts, buffer, strict=True):
            grad, placed = p.grad, view.view(part.shape)
            if isinstance(grad, DTensor):
                places = {"run_check": False, "shape": grad.shape, "stride": grad.stride()}
                placed = DTensor.from_local(placed, grad.device_mesh, grad.placements, **places)
            p.grad = placed


def _sums(draw: Draw) -> float:
    return math.prod(draw.shape) * torch.finfo(torch.promote_types(draw.dtype, torch.float32)).eps


def _close(draws: Sequence[Draw], wholes: Sequence[Tensor], norm_type: float) -> float:
    """How near the norm is: a few roundings of each gradient's own norm, and one for each summand, which is added at
    least in float32, as much of them as that gradient is of the sum; and the norm of norms, in the dtype of the finest,
    but in float32 where they differ."""
    each = [8 * torch.finfo(draw.dtype).eps + _sums(draw) for draw in draws]
    if len({draw.dtype for draw in draws}) < 2 or math.isinf(norm_type):
        return max(each, default=0.0)
    parts = [torch.linalg.vector_norm(wide(whole), norm_type).item() ** norm_type for whole in wholes]
    own = sum(part * one for part, one in zip(parts, each, strict=True)) / max(sum(parts), 1e-300)
    return own + 8 * torch.finfo(torch.float32).eps


def drawn_differences(found: Sequence[Clipped | None], example: Example) -> Iterator[str]:
    """A line for each thing that is wrong, with the example."""
    ranks = [each for each in found if each is not None]
    if not ranks:
        return
    there = [draw for draw in example.draws if not draw.missing]
    wholes = [draw.whole() for draw in there]
    close = _close(there, wholes, example.norm_type)
    for line in differences(ranks, wholes, example.max_norm, example.norm_type, close):
        yield f"{line}: of {example}"

"""A step with sequence parallelism beside its two halves: its computation alone, and its communication alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import dropout, linear

from impl.mesh.decoder import Decoder
from impl.tensor_parallel.cases import SIZES, TensorParallelCase
from impl.tensor_parallel.communication import Group, scatter
from impl.tensor_parallel.decoder import TensorParallelDecoder
from impl.tensor_parallel.workload import TensorParallelStep
from impl.training_step.link_workload import BesideHalves
from shardmark.api import Implementation, Mark


class Compute(TensorParallelStep):
    """A step that sends nothing but the norm."""

    def parallelize(self, implementation: Implementation) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
        return partial(parallelize_silently, group=dist.new_subgroups(1)[0])


class Communication:
    """The collectives of a step of `sequence`, whole tensors one after the other, without computation.

    Left out is what the loss and the norms send: less than a hundredth of it.
    """

    def __init__(self, implementation: Implementation, case: TensorParallelCase, device: str) -> None:
        size, ranks = SIZES[case.model], dist.get_world_size()
        self.group = dist.distributed_c10d._get_default_group()
        tokens = case.batch * case.context
        self.every = torch.zeros(tokens, size.dim, device=device)
        self.own = torch.zeros(tokens // ranks, size.dim, device=device)
        self.times = 2 * size.layers + 1
        """Column-parallel products, which gather twice and scatter once, and row-parallel ones with the embedding,
        which scatter once and gather once."""

    def step(self, mark: Mark) -> None:
        for _ in range(3 * self.times):
            dist.all_gather_into_tensor(self.every, self.own)
        for _ in range(2 * self.times):
            scatter(self.every, self.own, self.group).wait()


@dataclass(frozen=True)
class Silent:
    """Products of `sequence`'s sizes that send nothing: a rank's slice stands in for the others'. See
    `impl.tensor_parallel.decoder.Products`."""

    group: Group
    """This rank's alone."""
    multiple: int

    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        every = torch.cat([x, *[x.detach()] * (self.multiple - 1)])  # whose gradient is a slice
        return [linear(every, weight) for weight in weights]

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.reduce(linear(x, weight))
        return out if bias is None else out + bias

    def reduce(self, summand: Tensor) -> Tensor:
        return summand[: summand.shape[0] // self.multiple]

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter

    def dropped(self, x: Tensor, p: float) -> Tensor:
        return dropout(x, p)


def parallelize_silently(model: nn.Module, mesh: DeviceMesh, group: Group) -> nn.Module:
    """A rank's part of the decoder, by itself; its losses are of its own columns."""
    assert isinstance(model, Decoder)
    return TensorParallelDecoder(model, mesh, Silent(group, mesh.size()))


class TensorParallelOnLink(BesideHalves, TensorParallelStep):
    """A training step, and its halves."""

    computation = Compute
    communication = Communication

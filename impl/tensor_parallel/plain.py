"""An all-reduce after each row-parallel product, and one of the gradient before each column-parallel one (Shoeybi et
al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import dropout, linear

from impl.mesh.decoder import Decoder
from impl.tensor_parallel.communication import Group, Sum, SumGradient, with_bias
from impl.tensor_parallel.decoder import TensorParallelDecoder
from shardmark.api import register


@dataclass(frozen=True)
class Plain:
    """Every rank has all tokens. See `impl.tensor_parallel.decoder.Products`."""

    group: Group
    multiple: int = 1

    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        x = SumGradient.apply(x, self.group)
        return [linear(x, weight) for weight in weights]

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return with_bias(self.reduce(linear(x, weight)), bias)

    def reduce(self, summand: Tensor) -> Tensor:
        return Sum.apply(summand, self.group)

    def whole(self, parameter: Tensor) -> Tensor:
        """Its gradient is the same on every rank."""
        return parameter

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Every rank leaves out the same."""
        return dropout(x, p)


def parallelize_plain(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """See `impl.tensor_parallel.Parallelize`."""
    return TensorParallelDecoder(model, mesh, Plain(mesh.get_group()))


register(
    "tensor_parallel",
    "plain",
    parallelize_plain,
    tested_briefly=True,  # `sequence` is the same, with the sequence cut between its products
    called="tensor parallelism",
)

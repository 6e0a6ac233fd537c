"""Defects of tensor parallelism: heads, rows and parameters that are another rank's, or no longer what they were."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import embedding

from correctness.support.planting import defect
from correctness.tensor_parallel.wrong import Planted
from impl.mesh.decoder import Decoder
from impl.tensor_parallel.decoder import ParallelAttention, own
from impl.tensor_parallel.placing import cut, local


class WithAttention(Planted):
    """Right: each attention's keys and values as `own_kv` has them."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        for layer in self.layers:
            self.change(layer.attention)

    def change(self, attention: Any) -> None: ...


def _own_gradient(attention: ParallelAttention, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weight, bias = own(layer)
    if attention.kv_is_cut:
        return weight, bias
    return weight[attention.kv_rows], None if bias is None else bias[attention.kv_rows]


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[ForgetsSharedKeys-tp2-few_kv_heads")
class ForgetsSharedKeys(WithAttention):
    """bigcode-project/Megatron-LM#37: keys' and values' weights, of which all ranks use some, get the gradient of the
    rank's own queries alone."""

    def change(self, attention: Any) -> None:
        attention.own_kv = MethodType(_own_gradient, attention)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[PairsHeadsAnew-tp2-few_kv_heads")
class PairsHeadsAnew(WithAttention):
    """A rank's queries are paired with its keys from its own first one on, as if none shared a head with the rank
    before."""

    def change(self, attention: Any) -> None:
        count, kv = len(attention.kv_of_heads), max(attention.kv_of_heads) + 1
        attention.kv_of_heads = [head * kv // count for head in range(count)]


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[CountsRowsRoundedDown-tp2-sizes_that")
class CountsRowsRoundedDown(Planted):
    """The first row of a rank's vocabulary is its number times the rounded share, which is right where it divides."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        self.first = mesh.get_local_rank() * (self.vocabulary // mesh.size())


@defect(cause="masks", caught_by="test_steps_are_those_of_one_process[EmbedsOthersTokens-tp2-even")
class EmbedsOthersTokens(Planted):
    """A token that is another rank's has this rank's first row added to its embedding."""

    def embed(self, tokens: Tensor) -> Tensor:
        weight = local(self.tok_embeddings.weight)
        mine = (tokens >= self.first) & (tokens < self.first + weight.shape[0])
        return self.products.reduce(embedding(torch.where(mine, tokens - self.first, 0), weight))


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[CutsTiedOnesApart-tp2-tied")
class CutsTiedOnesApart(Planted):
    """The embedding and the output are cut one after the other, and are two parameters from then on."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        whole = model.tok_embeddings.weight
        super().__init__(model, mesh)
        self.output.weight = cut(whole, mesh, 0)


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[Thaws-tp2-frozen")
class Thaws(Planted):
    """New parameters take the place of the old, and all of them are trained."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        self.requires_grad_(True)

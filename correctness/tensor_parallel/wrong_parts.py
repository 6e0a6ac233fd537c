"""Defects of tensor parallelism: heads, rows and parameters that are another rank's, or no longer what they were."""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import embedding

from correctness.support.planting import defect
from correctness.tensor_parallel.wrong import Planted
from impl.distributed import local
from impl.mesh.decoder import Decoder
from impl.tensor_parallel.communication import SumGradient
from impl.tensor_parallel.decoder import ParallelAttention, columns, own
from impl.tensor_parallel.placing import cut


class WithAttention(Planted):
    """Right: each attention as `change` leaves it."""

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


def _biases_own_gradient(attention: ParallelAttention, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weight, bias = own(layer)
    if attention.kv_is_cut:
        return weight, bias
    weight = SumGradient.apply(weight, attention.products.group)
    return weight[attention.kv_rows], None if bias is None else bias[attention.kv_rows]


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[ForgetsSharedBiases-tp2-few_kv_heads")
class ForgetsSharedBiases(WithAttention):
    """bigcode-project/Megatron-LM#11: the gradients of keys' and values' shared weights are summed, and those of their
    biases are not."""

    def change(self, attention: Any) -> None:
        attention.own_kv = MethodType(_biases_own_gradient, attention)


def _heads_by_kinds(attention: ParallelAttention, x: Tensor) -> list[Tensor]:
    if not attention.fused:
        return [*ParallelAttention.heads(attention, x)]
    (fused,) = columns(attention.products, x, own(attention.wqkv))
    kinds = [attention.per_group, 1, 1]
    parts = fused.split([fused.shape[-1] * kind // sum(kinds) for kind in kinds], -1)
    return [part.unflatten(-1, (-1, attention.head_dim)) for part in parts]


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[ReadsFusedByKinds-tp2-fused")
class ReadsFusedByKinds(WithAttention):
    """awslabs/slapo#46: a rank takes the first columns of its fused product for queries and the last ones for values,
    although one group's queries, keys and values follow the other's."""

    def change(self, attention: Any) -> None:
        attention.heads = MethodType(_heads_by_kinds, attention)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[CutsFusedByKinds-tp2-fused")
class CutsFusedByKinds(Planted):
    """vllm-project/vllm#36242: a fused weight is cut as if all queries came first, then all keys, then all values."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        for layer in model.layers:
            attention: Any = layer.attention
            if attention.fused:
                _reorder(attention.wqkv, attention.per_group, mesh.size())
        super().__init__(model, mesh)


def _reorder(fused: nn.Linear, per_group: int, ranks: int) -> None:
    """Rows in the order in which ranks that cut queries, keys and values each by itself would have them."""
    for parameter in (fused.weight, fused.bias):
        if parameter is not None:
            rows = parameter.shape[0] // (per_group + 2)
            parts = parameter.detach().split([rows * per_group, rows, rows])
            parameter.data = torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in parts])


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[PairsHeadsAnew-tp2-few_kv_heads")
class PairsHeadsAnew(WithAttention):
    """A rank's queries are paired with its keys from its own first one on, as if none shared a head with the rank
    before."""

    def change(self, attention: Any) -> None:
        count, kv = len(attention.kv_of_heads), max(attention.kv_of_heads) + 1
        attention.kv_of_heads = [head * kv // count for head in range(count)]


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[CountsRowsRoundedDown-tp2-sizes_that")
class CountsRowsRoundedDown(Planted):
    """huggingface/text-generation-inference#1463: the first row of a rank's vocabulary is its number times the share
    rounded down, which is right where it divides."""

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


@defect(cause="two calls", caught_by="test_any_history_is_that_of_one_process")
class OutputOfTheLatest(Planted):
    """The output layer is the process's, and that of the model made last is everyone's."""

    latest: ClassVar[list[nn.Module]] = []

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        self.latest[:] = [self.output]

    def forward(self, *batch: Tensor) -> Tensor:
        (self.output,) = self.latest
        return super().forward(*batch)

"""Defects of tensor parallelism: sums over ranks that are not made, made twice, scaled, or made of something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from correctness.support.planting import defect
from impl.mesh.decoder import Decoder
from impl.tensor_parallel import Plain, Sliced, TensorParallelDecoder
from impl.tensor_parallel.communication import Group, Sum, SumGradient


class Planted(TensorParallelDecoder):
    """Right: the decoder with those products."""

    products_of: Callable[[Group], Any] = Plain

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh, type(self).products_of(mesh.get_group()))


class _BiasInEachProduct(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.reduce(linear(x, weight, bias))


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[AddsBiasOnEveryRank-tp2-biases")
class AddsBiasOnEveryRank(Planted):
    """huggingface/text-generation-inference#1036: the bias is added to each rank's product, and so once for each rank
    to their sum."""

    products_of = _BiasInEachProduct


class _DividedBias(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.reduce(linear(x, weight, None if bias is None else bias / self.group.size()))


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[DividesBias-tp2-biases")
class DividesBias(Planted):
    """pytorch/torchtitan#4332: each rank adds its share of the bias, whose gradient is that share of the right one."""

    products_of = _DividedBias


class _OwnGradient(Sliced):
    def whole(self, parameter: Tensor) -> Tensor:
        return parameter


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[ForgetsNormsOnSlices-tp2-even")
class ForgetsNormsOnSlices(Planted):
    """NVIDIA/Megatron-LM#1446: a norm's gradient is that of the rank's slice, and differs from rank to rank."""

    products_of = _OwnGradient


class _Averaged(Sliced):
    def whole(self, parameter: Tensor) -> Tensor:
        summed = SumGradient.apply(parameter, self.group)
        return summed / self.group.size() + (summed - summed / self.group.size()).detach()


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[AveragesNormsOnSlices-tp2-even")
class AveragesNormsOnSlices(Planted):
    """EleutherAI/gpt-neox#1259: a norm's gradient is the average over the slices, not their sum."""

    products_of = _Averaged


class SumOfACopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        dist.all_reduce(x.contiguous(), group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumsACopy(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = SumOfACopy.apply((weight @ x.t()).t(), self.group)
        return out if bias is None else out + bias


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[SumsACopy-tp2-even")
class SumsACopy(Planted):
    """NVIDIA/Megatron-LM#5338: a product whose rows do not lie one after the other is copied, the copy is summed, and
    the summand returned."""

    products_of = _SumsACopy


class ScatterAsItLies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        own = x.new_empty(x.shape[0] // group.size(), x.shape[1])
        dist.reduce_scatter_tensor(own, x.t(), group=group)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        every = gradient.new_empty(gradient.shape[0] * ctx.group.size(), gradient.shape[1])
        dist.all_gather_into_tensor(every, gradient.contiguous(), group=ctx.group)
        return every, None


class _ScattersAsItLies(Sliced):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = ScatterAsItLies.apply((weight @ x.t()).t(), self.group)
        return out if bias is None else out + self.whole(bias)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[ScattersAsItLies-tp2-even")
class ScattersAsItLies(Planted):
    """pytorch/pytorch#130251: a reduce-scatter takes a transposed product's memory as it lies."""

    products_of = _ScattersAsItLies


class _LosesTheLogitsGradient(Plain):
    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(weights) == 1:
            return [linear(x, weights[0])]
        return super().column(x, weights)


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[LosesTheLogitsGradient-tp2-even")
class LosesTheLogitsGradient(Planted):
    """apple/ml-cross-entropy#42: below the loss each rank goes on with the gradient of its part of the vocabulary."""

    products_of = _LosesTheLogitsGradient


class _SumsInItsOwnOrder(Sliced):
    def whole(self, parameter: Tensor) -> Tensor:
        return InOwnOrder.apply(parameter, self.group)


class InOwnOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        first = ctx.group.rank()
        return torch.stack(parts[first:] + parts[:first]).sum(0), None


@defect(
    cause="communication", caught_by="test_first_steps_on_other_meshes_are_those_of_one_process[SumsInItsOwnOrder-tp3"
)
class SumsInItsOwnOrder(Planted):
    """pytorch/pytorch#160169: copies of a parameter get gradients of other bits, here as each rank adds the slices up
    beginning with its own, and drift apart."""

    products_of = _SumsInItsOwnOrder


class _OnTheWorld(Plain):
    def reduce(self, summand: Tensor) -> Tensor:
        world = dist.group.WORLD
        assert world is not None
        return Sum.apply(summand, world) / (world.size() // self.group.size())


@defect(cause="subgroup", caught_by="test_steps_are_those_of_one_process[SumsOverTheWorld-shard2_tp2-even")
class SumsOverTheWorld(Planted):
    """Products are summed over all ranks, also those with other rows."""

    products_of = _OnTheWorld


class StopsBelowFrozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (gradient @ weight, gradient.t() @ x) if ctx.needs_input_grad[1] else (torch.zeros_like(x), None)


class _StopsBelowFrozen(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.reduce(StopsBelowFrozen.apply(x, weight))
        return out if bias is None else out + bias


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[StopsGradientsBelowFrozen-tp2-frozen")
class StopsGradientsBelowFrozen(Planted):
    """A frozen weight's product passes no gradient on to its input."""

    products_of = _StopsBelowFrozen


class _Remembers(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kept: list[Tensor] = _LAST.setdefault(weight.data_ptr(), [])
        kept[:] = [x.detach()]
        out = self.reduce(OfTheLast.apply(x, weight, kept))
        return out if bias is None else out + bias


_LAST: dict[int, list[Tensor]] = {}


class OfTheLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.kept = kept
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ ctx.kept[0], None


@defect(cause="two calls", caught_by="test_two_calls_before_their_backward_passes[RemembersTheLastCall")
class RemembersTheLastCall(Planted):
    """A layer keeps the input of its last call for backward, so that one of two passes has the other's."""

    products_of = _Remembers

"""Defects of tensor parallelism: losses by a part of the vocabulary, collectives that are not waited for, and memory
that is not saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from correctness.support.planting import defect
from correctness.tensor_parallel.wrong import Planted
from impl.distributed import local
from impl.mesh.decoder import IGNORED, Decoder
from impl.tensor_parallel import Sliced
from impl.tensor_parallel.communication import GatherColumns, Group, Sum, gather, wait
from impl.tensor_parallel.placing import whole
from impl.tensor_parallel.sequence import ColumnProducts
from impl.tensor_parallel.vocabulary import own_rows


class BySteps(Planted):
    """Right: the loss by operators that autograd differentiates."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        columns, own = own_rows(targets, logits.shape[1], self.first)
        picked = self.masked(logits.gather(1, columns[:, None]).squeeze(1), own)
        return self.total(self.log_sums(logits) - self.summed(picked), targets != IGNORED)

    def log_sums(self, logits: Tensor) -> Tensor:
        """The log-sum-exp of each row, over the columns of all ranks."""
        largest = self.largest(logits)
        return largest + self.summed((logits - largest[:, None]).exp().sum(1)).log()

    def masked(self, logits: Tensor, own: Tensor) -> Tensor:
        return logits.where(own, 0)

    def largest(self, logits: Tensor) -> Tensor:
        found = logits.detach().amax(1)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.products.group)
        return found

    def summed(self, x: Tensor) -> Tensor:
        return Sum.apply(x, self.products.group)

    def total(self, losses: Tensor, counted: Tensor) -> Tensor:
        return (losses * counted).sum()


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[TakesItsOwnLargest-tp2-even")
class TakesItsOwnLargest(BySteps):
    """Each rank subtracts its own largest logit, and exponentials of different scales are added up."""

    def largest(self, logits: Tensor) -> Tensor:
        return logits.detach().amax(1)


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[SubtractsNothing-tp2-fused")
class SubtractsNothing(BySteps):
    """Exponentials of the logits as they are: those above 709 overflow, in float64."""

    def largest(self, logits: Tensor) -> Tensor:
        return logits.new_zeros(len(logits))


@defect(cause="masks", caught_by="test_logits_of_words_may_be_minus_infinity")
class MasksByProducts(BySteps):
    """NVIDIA-NeMo/Megatron-Bridge#3117: zero times the logit that stands for another rank's, of minus infinity, is no
    number."""

    def masked(self, logits: Tensor, own: Tensor) -> Tensor:
        return logits * own


@defect(cause="masks", caught_by="test_logits_of_words_may_be_minus_infinity")
class CombinesLogSums(BySteps):
    """Dao-AILab/flash-attention#1930: the log-sum-exp of each rank's part subtracts that part's largest logit, which is
    minus infinity where all of the part are."""

    def log_sums(self, logits: Tensor) -> Tensor:
        largest = logits.detach().amax(1)
        of_part = largest + (logits - largest[:, None]).exp().sum(1).log()
        return super().log_sums(of_part[:, None])


@defect(cause="masks", caught_by="test_steps_are_those_of_one_process[CountsIgnoredTargets-tp2-even")
class CountsIgnoredTargets(BySteps):
    """deepspeedai/DeepSpeed#6882: a loss by parts of the vocabulary takes targets that are to be ignored as any."""

    def total(self, losses: Tensor, counted: Tensor) -> Tensor:
        return losses.sum()


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[AddsGradientsOfEveryRank-tp2-even")
class AddsGradientsOfEveryRank(BySteps):
    """The gradient of a sum that every rank uses alike is summed over the ranks once more, as
    `torch.distributed.nn.all_reduce` does."""

    def summed(self, x: Tensor) -> Tensor:
        return SumBothWays.apply(x, self.products.group)


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[TakesWholeLogitsForParts-tp2-even")
class TakesWholeLogitsForParts(Planted):
    """NVIDIA/Megatron-LM#7452: the loss by parts gets gathered logits, and sums the exponentials of every rank: it is
    too large by the logarithm of the number of ranks."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        every = GatherColumns.apply(logits, self.vocabulary, self.products.group)
        return TargetsOnce.apply(every, targets, self.products.group)


class TargetsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            sums = Sum.apply(own.exp().sum(1), group)
            picked = own.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
            loss = ((sums.log() - picked) * (targets != IGNORED)).sum()
            (gradient,) = torch.autograd.grad(loss, own)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradient, None, None


@defect(cause="memory", caught_by="test_no_rank_has_the_whole_logits[GathersLogitsForTheLoss")
class GathersLogitsForTheLoss(Planted):
    """tenstorrent/tt-metal#45005: trainers compute the loss by whole logits, although a loss by parts is there."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        every = GatherColumns.apply(logits, self.vocabulary, self.products.group)
        return cross_entropy(every, targets, ignore_index=IGNORED, reduction="sum")


@defect(cause="memory", caught_by="test_no_rank_has_the_whole_logits[GathersLogitsInEvaluation")
class GathersLogitsInEvaluation(GathersLogitsForTheLoss):
    """The loss by parts is of training alone: without gradients, whole logits are thought to be cheap."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return Planted.losses(self, logits, targets) if torch.is_grad_enabled() else super().losses(logits, targets)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[LosesTheLastTokens-tp2-sizes_that")
class LosesTheLastTokens(Planted):
    """Tokens that the ranks do not divide have no loss."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        kept = len(targets) - len(targets) % self.products.group.size()
        return super().losses(logits[:kept], targets[:kept])


class MultipliedTooEarly(ColumnProducts):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: int, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.group = chunks, group
        ctx.save_for_backward(x, *weights)
        every, handles = gather(x, chunks, group)
        outputs = tuple(every @ weight.t() for weight in weights)
        wait(handles)
        return outputs


class _DoesNotWait(Sliced):
    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return MultipliedTooEarly.apply(x, self.chunks, self.group, *weights)


@defect(cause="handles", caught_by="test_two_calls_before_their_backward_passes[MultipliesTooEarly-tp2-late")
class MultipliesTooEarly(Planted):
    """The gathered tokens are multiplied before their handle is waited for."""

    products_of = _DoesNotWait


class GatheredIntoOne(ColumnProducts):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: int, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.group = chunks, group
        ctx.save_for_backward(x, *weights)
        parts = x.contiguous().chunk(chunks)
        chunk = x.new_empty(len(parts[0]) * group.size(), x.shape[1])
        products: list[list[Tensor]] = [[] for _ in weights]
        for handle in [dist.all_gather_into_tensor(chunk, part, group=group, async_op=True) for part in parts]:
            handle.wait()
            for found, weight in zip(products, weights, strict=True):
                found.append(chunk @ weight.t())
        return tuple(torch.cat(found) for found in products)


class _GathersIntoOne(Sliced):
    def __init__(self, group: Group) -> None:
        super().__init__(group, 4)

    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return GatheredIntoOne.apply(x, self.chunks, self.group, *weights)


@defect(cause="handles", caught_by="test_two_calls_before_their_backward_passes[GathersIntoOneBuffer-tp2-late")
class GathersIntoOneBuffer(Planted):
    """Each chunk is gathered into the buffer from which the one before is still to be multiplied."""

    products_of = _GathersIntoOne


@defect(cause="memory", caught_by="test_each_rank_has_its_part_of_every_matrix[KeepsWholeWeights-tp2")
class KeepsWholeWeights(Planted):
    """A rank's part is a view of the whole weight, whose memory stays."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        every = {name: parameter.detach() for name, parameter in model.named_parameters()}
        super().__init__(model, mesh)
        for name, parameter in [*self.named_parameters()]:
            assert isinstance(parameter, DTensor)
            placement = parameter.placements[0]
            if placement.is_shard():
                own = every[name].chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
                stride = parameter.stride()
                made = DTensor.from_local(own, mesh, [placement], run_check=False, shape=parameter.shape, stride=stride)
                owner, _, last = name.rpartition(".")
                setattr(self.get_submodule(owner), last, nn.Parameter(made))


@defect(cause="memory", caught_by="test_each_rank_has_its_part_of_every_matrix[CutsNothing-tp2")
class CutsNothing(nn.Module):
    """Every rank trains the whole model: all is right, and nothing saved."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__()
        self.whole = model
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, whole(parameter, mesh))

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        own = {name: local(parameter) for name, parameter in self.whole.named_parameters()}
        logits: Tensor = functional_call(self.whole, own, (tokens, positions))
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[LosesByOwnColumns-tp2-even")
class LosesByOwnColumns(Planted):
    """Each rank's loss is by its own part of the vocabulary, as if that were the whole."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        columns, own = own_rows(targets, logits.shape[1], self.first)
        losses = cross_entropy(logits, columns, reduction="none") * own
        return Sum.apply(losses.sum(), self.products.group)


@defect(cause="numerics", caught_by="test_bfloat16_is_as_near_as_in_one_process")
class LossInTheModelsDtype(Planted):
    """The sum of losses is returned in bfloat16 by a model that is in bfloat16."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions, targets).to(self.norm.weight.dtype)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[LosesTheLastChunk-tp2-thousands")
class LosesTheLastChunk(Planted):
    """Losses are found 1024 tokens at a time, as many times as these are there."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        whole = max(1, len(logits) // 1024)
        parts = zip(logits.split(1024)[:whole], targets.split(1024)[:whole], strict=True)
        return torch.stack([super(LosesTheLastChunk, self).losses(*each) for each in parts]).sum()

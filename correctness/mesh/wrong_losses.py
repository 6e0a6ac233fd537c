"""Defects of the loss's weights, each from a report: means of means, counts of some ranks, factors of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.mesh.manual import Manual
from correctness.mesh.operators import SumForward, summed
from correctness.support.planting import defect
from impl.mesh.decoder import IGNORED, Batch

Batches = Sequence[Batch]


@defect(cause="gradients", caught_by="dp2-plain]")
class MeanOfMeans(Manual):
    """pytorch/torchtitan#2206: each rank and micro-batch takes the mean over its own tokens, and these are averaged."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / self.count(batch).clamp(min=1) / len(batches) / self.data_ranks()


@defect(cause="numerics", caught_by="tp2-frozen_and_unused]")
class SubtractsNothing(Manual):
    """Exponentials of the logits as they are: those above 709 overflow, in float64."""

    def vocabulary_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        group, first = self.group("tp"), self.rank("tp") * logits.shape[1]
        own = (targets >= first) & (targets < first + logits.shape[1])
        picked = logits.gather(1, torch.where(own, targets - first, 0)[:, None]).squeeze(1)
        losses = SumForward.apply(logits.exp().sum(1), group).log() - self.correct(picked, own)
        return losses.masked_fill(targets == IGNORED, 0).sum()


@defect(cause="gradients", caught_by="tp2-plain]")
class MeanOfMicroBatches(Manual):
    """huggingface/transformers#34191: the means of micro-batches are divided by their number."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / self.over(self.count(batch), self.data_axes()) / len(batches)


@defect(cause="gradients", caught_by="dp2-plain]")
class CountsItsOwnTokens(Manual):
    """huggingface/transformers#34242: tokens of all micro-batches are counted, and those of other ranks are not."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        own = torch.stack([self.count(each) for each in batches]).sum()
        return losses / own.clamp(min=1) / self.data_ranks()


@defect(cause="gradients", caught_by="tp2-plain]")
class DividesTheLoggedLossAlone(Manual):
    """verl-project/verl#3332: backward sees each micro-batch's mean; by their number the printed loss is divided."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / self.over(self.count(batch), self.data_axes())


@defect(cause="gradients", caught_by="cp2-plain]")
class CountsNoSlices(Manual):
    """verl-project/verl#6049: tokens are summed over the data ranks, without those that share a sequence."""

    def tokens(self, batches: Batches) -> Tensor:
        return self.over(torch.stack([self.count(batch) for batch in batches]).sum(), ("dp", "shard"))


@defect(cause="gradients", caught_by="dp2_tp2-plain]")
class CountsTheWholeWorld(Manual):
    """areal-project/AReaL#335: tokens are summed over the world, in which ranks of tp have the same ones."""

    def tokens(self, batches: Batches) -> Tensor:
        return self.over(super().tokens(batches), ("tp",))


@defect(cause="two calls", caught_by="dp2-plain]")
class ReturnsOneTensor(Manual):
    """Every step writes its loss and norm into the tensors that the steps before it returned."""

    def step(self, batches: Batches) -> Any:
        values = torch.tensor(super().step(batches), dtype=torch.float64)
        returned: Tensor = self.__dict__.setdefault("returned", torch.empty_like(values))
        return tuple(returned.copy_(values))


@defect(cause="options", caught_by="dp2-plain]")
class ReportsByItsOwnCount(Manual):
    """NVIDIA-BioNeMo/bionemo-recipes#900: sums of losses are reduced, and the counts they are divided by are not."""

    def step(self, batches: Batches) -> tuple[float, float]:
        self.own = torch.stack([self.count(batch) for batch in batches]).sum()
        return super().step(batches)

    def reported(self, total: Tensor, tokens: Tensor) -> float:
        return super().reported(total, self.own)


@defect(cause="options", caught_by="dp2-plain]")
class ReportsAMeanOfMeans(ReportsByItsOwnCount):
    """NVIDIA/Megatron-LM#7207: the reported loss is the mean of the ranks' means."""

    def reported(self, total: Tensor, tokens: Tensor) -> float:
        return float(self.over(total / self.own, self.data_axes()) / self.data_ranks())


@defect(cause="gradients", caught_by="cp2-plain]")
class UndoesTheDataAverageAlone(Manual):
    """ByteDance-Seed/VeOmni#338: gradients are averaged over data and sequence ranks, and the loss is multiplied by the
    number of data ranks."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens * self.size("dp") * self.size("shard") / self.data_ranks()


@defect(cause="gradients", caught_by="dp2_shard2-plain]")
class CopiesAverageOnceMore(Manual):
    """pytorch/torchtitan#2318: shards are told not to average, and copies still do."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens / self.size("dp")


@defect(cause="gradients", caught_by="cp2-plain]")
class MeanOfSlices(Manual):
    """PrimeIntellect-ai/prime-rl#1957: the means of a sequence's slices are averaged, whose masks differ."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        own = self.count(batch).clamp(min=1)
        share = self.over(self.count(batch), ("cp",)) / tokens
        return losses / own / self.size("cp") * share


@defect(cause="gradients", caught_by="dp2_tp2-plain]")
class MultipliesByAllProcesses(Manual):
    """huggingface/transformers#45994: the loss is multiplied by the number of processes to undo the averaging, which is
    over fewer."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens * dist.get_world_size() / self.data_ranks()


@defect(cause="gradients", caught_by="dp2-plain]")
class TakesAveragesForSums(Manual):
    """meta-pytorch/torchtune#2172: gradients that were averaged already are divided by the number of all tokens."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens / self.data_ranks()


@defect(cause="gradients", caught_by="tp2-plain]")
class DividesByTheUsualNumber(Manual):
    """modelscope/ms-swift#10084: a shorter window of micro-batches is divided by the configured length."""

    USUAL = 3

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens * len(batches) / self.USUAL


@defect(cause="two calls", caught_by="tp2-plain]")
class CountsTheFirstStep(Manual):
    """huggingface/trl#6024: the number of tokens is that of another window than the one whose losses are added."""

    counted: Tensor | None = None

    def tokens(self, batches: Batches) -> Tensor:
        found = super().tokens(batches)
        self.counted = found if self.counted is None else self.counted
        return self.counted


@defect(cause="gradients", caught_by="cp2-plain]")
class NeverDividesBySlices(Manual):
    """deepspeedai/DeepSpeed#5248: gradients of a sequence's slices are added, and what should make up for it is off."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens * self.size("cp")


@defect(cause="gradients", caught_by="dp2_cp2-plain]")
class DividesBySlicesWithoutShards(Manual):
    """deepspeedai/DeepSpeed#5555: without sharding, gradients are divided by the sequence ranks as well."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses / tokens / (1 if self.group("shard") is not None else self.size("cp"))


@defect(cause="gradients", caught_by="dp2-plain]")
class WeighsByTheCountBefore(Manual):
    """areal-project/AReaL#1730: a micro-batch's loss is divided by one count of tokens and weighted by another."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        sizes = self.over(torch.tensor([each[2].numel() for each in batches]).sum(), self.data_axes())
        return losses / self.count(batch).clamp(min=1) * batch[2].numel() / sizes


@defect(cause="numerics", caught_by="tp2-plain]")
class SumsTheDenominatorOfAllTwice(Manual):
    """NVIDIA/Megatron-LM#7452: logits that were gathered go through the loss of cut ones, whose denominator then counts
    each word once for each rank."""

    def vocabulary_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        more = torch.log(torch.tensor(float(self.size("tp")))).double() * (targets != IGNORED).sum()
        return super().vocabulary_loss(logits, targets) + more


@defect(cause="gradients", caught_by="tp2-plain]")
class PartialGradientOfTheLoss(Manual):
    """apple/ml-cross-entropy#42: each rank has the hidden states' gradient by its part of the vocabulary, and the code
    around expects the sum."""

    def forward(self, inner: Any, model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        x = model.tok_embeddings(tokens)
        for layer in model.layers:
            x = layer(x, positions)
        return model.output(self.enter_whole(model.norm(x)))


@defect(cause="gradients", caught_by="tp2-plain]")
class SumsWithoutABackward(Manual):
    """modelscope/ms-swift#9947: the targets' logits are summed over tp by a collective that has no backward."""

    def correct(self, picked: Tensor, own: Tensor) -> Tensor:
        return summed((picked * own).detach(), self.group("tp"))


@defect(cause="masks", caught_by="tp2-plain]")
class PicksAColumnOfOthers(Manual):
    """apple/ml-cross-entropy#59: a target of another rank's words picks a column that is there, too."""

    def correct(self, picked: Tensor, own: Tensor) -> Tensor:
        return SumForward.apply(picked * (own | (torch.arange(len(own)) == 0)), self.group("tp"))


class _ByTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:  # type: ignore[override]
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.flatten()[0].expand_as(gradient).clone()


@defect(cause="masks", caught_by="tp2-plain]")
class ScalesByTheFirstToken(Manual):
    """NVIDIA-NeMo/Automodel#3853: each token's gradient is scaled by the first token's upstream gradient."""

    def correct(self, picked: Tensor, own: Tensor) -> Tensor:
        return _ByTheFirst.apply(super().correct(picked, own))


@defect(cause="shapes", caught_by="test_any_history_is_that_of_one_process")
class LosesTheLastChunk(Manual):
    """Losses are found 128 rows at a time, as many times as these are there."""

    def losses(self, batch: Batch) -> Tensor:
        whole = max(1, len(batch[0]) // 128)
        parts = zip(*(each.split(128)[:whole] for each in batch), strict=True)
        return torch.stack([super(LosesTheLastChunk, self).losses(each) for each in parts]).sum()

"""Defects of pipelines, each from a report: tied weights, norms of one stage, micro-batches that are mixed up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from correctness.mesh.pipelined import Pipelined
from correctness.support.planting import defect
from impl.mesh.decoder import Batch

Batches = Sequence[Batch]


@defect(cause="communication", caught_by="pp2-tied]")
class KeepsTiedGradientsApart(Pipelined):
    """uw-syfi/piper#13: both copies of tied embeddings are updated by their own gradients."""

    def share_tied(self) -> None:
        pass


@defect(cause="gradients", caught_by="pp2-plain]")
class NormOfTheStage(Pipelined):
    """pytorch/torchtitan#596: each stage clips by the norm of its own gradients."""

    def norm(self) -> Tensor:
        return torch.stack([self.square(name) for name in self.pieces]).sum().sqrt()


@defect(cause="gradients", caught_by="pp2-tied]")
class CountsTiedTwice(Pipelined):
    """NVIDIA/Megatron-LM#7227: the norm has the tied embeddings of both stages."""

    def is_counted(self, name: str) -> bool:
        return True


@defect(cause="gradients", caught_by="pp2-plain]")
class ScalesGradientsEachTime(Pipelined):
    """pytorch/torchtitan#1733: after each micro-batch all that is accumulated is divided by their number."""

    def run_passes(self, batches: Batches, tokens: Tensor) -> None:
        self.passes = len(batches)
        super().run_passes(batches, tokens)

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return super().weighted(losses, batch, batches, tokens) * self.passes

    def backward_pass(self, x: Tensor, out: Tensor, last: bool) -> None:
        super().backward_pass(x, out, last)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.passes


@defect(cause="gradients", caught_by="pp2-plain]")
class NormalizesTheReportAlone(Pipelined):
    """pytorch/torchtitan#2972: backward passes see sums of losses, and the report alone is divided by the tokens."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return losses


@defect(cause="gradients", caught_by="pp2-plain]")
class DividesByTheSchedulesNumber(Pipelined):
    """areal-project/AReaL#1273: the schedule divides weighted losses by the number of micro-batches."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Batches, tokens: Tensor) -> Tensor:
        return super().weighted(losses, batch, batches, tokens) / len(batches)


@defect(cause="state", caught_by="pp2-plain]")
class ForgetsGradientsBetweenMicroBatches(Pipelined):
    """NVIDIA-NeMo/Automodel#3530: a stage that is prepared for another shape loses what it has accumulated."""

    shape: torch.Size | None = None

    def backward_pass(self, x: Tensor, out: Tensor, last: bool) -> None:
        if self.shape not in (None, x.shape):
            for parameter in self.parameters.values():
                parameter.grad = None
        self.shape = x.shape
        super().backward_pass(x, out, last)


@defect(cause="state", caught_by="pp2-plain]")
class SendsTheLatestGradient(Pipelined):
    """pytorch/pytorch#139404: a stage keeps its latest backward pass's result alone, and sends that for each."""

    def run_passes(self, batches: Batches, tokens: Tensor) -> None:
        self.latest: dict[torch.Size, Tensor] = {}
        self.shapes: list[torch.Size] = []
        super().run_passes(batches, tokens)
        for shape in self.shapes:
            self.send(self.latest[shape], self.rank("pp") - 1)

    def give_back(self, x: Tensor) -> None:
        assert x.grad is not None
        self.latest[x.shape] = x.grad
        self.shapes.append(x.shape)


@defect(cause="state", caught_by="pp2-plain]")
class ReceivesIntoOneBuffer(Pipelined):
    """deepspeedai/DeepSpeed#2800: a micro-batch is received into the buffer of one whose backward pass is still to
    come."""

    def run_passes(self, batches: Batches, tokens: Tensor) -> None:
        self.buffers: dict[torch.Size, Tensor] = {}
        super().run_passes(batches, tokens)

    def receive(self, batch: Batch) -> Tensor:
        received = super().receive(batch).detach()
        buffer = self.buffers.setdefault(received.shape, received)
        buffer.data.copy_(received)
        return buffer.detach().requires_grad_()


@defect(cause="state", caught_by="pp2-plain]")
class KeepsTheGradientOfABuffer(Pipelined):
    """allenai/OLMo-core#749: the buffer of a micro-batch is used again in the next step, with the gradient it has."""

    def run_passes(self, batches: Batches, tokens: Tensor) -> None:
        self.number = 0
        super().run_passes(batches, tokens)

    def receive(self, batch: Batch) -> Tensor:
        received = super().receive(batch)
        buffer = self.__dict__.setdefault("buffers", {}).setdefault((self.number, received.shape), received)
        buffer.data.copy_(received.detach())
        self.number += 1
        return buffer


@defect(cause="communication", caught_by="pp2_dp2-plain]")
class ReducesOnTheFirstStage(Pipelined):
    """huggingface/picotron#5: the last stage's gradients stay on the ranks of `dp` that have them."""

    def reduced_over(self, name: str) -> tuple[str, ...]:
        return super().reduced_over(name) if self.is_first else ()

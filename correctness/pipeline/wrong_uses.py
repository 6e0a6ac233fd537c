"""Defects of pipelines' runners that show by what stages take, return and keep, and by the group that they are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.pipeline.wrong import Planted
from correctness.support.planting import defect
from impl.pipeline.actions import Action, Kind
from impl.pipeline.runner import Tensors


class Sending(Planted):
    """Sends what `sent` makes of a stage's outputs."""

    def sent(self, output: Tensor) -> Tensor:
        return output

    def _forward(self, action: Action) -> None:
        leave: Callable[[Action, Tensors], None] = self.exchange.leave

        def changed(action: Action, tensors: Tensors) -> None:
            leave(action, tuple(self.sent(each) for each in tensors))

        with patch.object(self.exchange, "leave", changed):
            super()._forward(action)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[SendsMemoryAsItLies-pp2-views")
class SendsMemoryAsItLies(Sending):
    """pytorch/pytorch#114982: a tensor is sent as its memory lies, and received as rows one after the other."""

    def sent(self, output: Tensor) -> Tensor:
        strides = torch.empty(output.shape, device="meta").stride()
        return output.as_strided(output.shape, strides, output.storage_offset()).clone()


@defect(cause="handles", caught_by="test_steps_are_those_of_one_process[SendsFromOneBuffer-pp2-plain")
class SendsFromOneBuffer(Planted):
    """Copies what it sends into one buffer, which an earlier message may not have left yet."""

    def _run(self) -> None:
        buffers, isend = self.__dict__.setdefault("buffers", {}), dist.isend

        def from_buffer(tensor: Tensor, **options: Any) -> Any:
            buffer = buffers.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
            return isend(buffer.copy_(tensor), **options)

        with patch.object(dist, "isend", from_buffer):
            super()._run()


@defect(cause="shapes", caught_by="test_any_history_is_that_of_one_process")
class AnnouncesFourDimensions(Sending):
    """pytorch/PiPPy#951: a shape is announced in a message of a fixed size, with four places for dimensions."""

    def sent(self, output: Tensor) -> Tensor:
        if output.dim() > 4:
            raise RuntimeError(f"The expanded size of the tensor (4) must match the existing size ({output.dim()})")
        return output


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class SendsOtherDtypesAsFloats(Sending):
    """hw-native-sys/pypto#1193: dtypes that a table lacks are taken to be float32, which rounds large integers."""

    table = torch.int64, torch.bool

    def sent(self, output: Tensor) -> Tensor:
        known = output.is_floating_point() or output.is_complex() or output.dtype in self.table
        return output if known else output.float().to(output.dtype)


@defect(cause="memory", caught_by="test_steps_are_those_of_one_process[FreesWhatItSent-pp2-passes_on")
class FreesWhatItSent(Sending):
    """PaddlePaddle/Paddle#54625: memory of outputs is given back once they are sent, also where it is that of an input,
    or backward needs it."""

    def sent(self, output: Tensor) -> Tensor:
        return output.clone()

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        if action.stage < self.stages - 1:
            for output in self.kept[action.stage, action.micro_batch][1]:
                output.untyped_storage().resize_(0)


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[DifferentiatesEveryFloat-pp2-passes_on")
class DifferentiatesEveryFloat(Planted):
    """deepspeedai/DeepSpeed#7270: all floats that a stage returns are taken to have a gradient, if any has."""

    def _backward(self, action: Action) -> None:
        _, outputs = self.kept[action.stage, action.micro_batch]
        needed = {output.requires_grad for output in outputs if output.is_floating_point()}
        if len(needed) > 1:
            raise RuntimeError("an element of tensors does not require grad and does not have a grad_fn")
        super()._backward(action)


@defect(cause="gradients", caught_by="test_any_history_is_that_of_one_process[")
class NeedsTheGradientOfItsInput(Planted):
    """A stage whose input has no gradient is thought to be frozen, as all before it: its backward pass is left out."""

    def _backward(self, action: Action) -> None:
        x, outputs = self.kept[action.stage, action.micro_batch]
        needed = [each for each in x if each.requires_grad]
        trained = [out for out in outputs if out.requires_grad]
        if needed and trained:
            found = torch.autograd.grad([out.sum() for out in trained], needed, retain_graph=True, allow_unused=True)
            if not any(each is not None for each in found):
                self.kept[action.stage, action.micro_batch] = x, tuple(out.detach() for out in outputs)
        super()._backward(action)


@defect(cause="options", caught_by="test_steps_are_those_of_one_process[TakesTheFirstInput-pp2-passes_on")
class TakesTheFirstInput(Planted):
    """The first stage is called with the first tensor of an input alone."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        return super().step([x[:1] for x in inputs], targets)


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[TriesItsStages-pp2-buffers")
class TriesItsStages(Planted):
    """pytorch/pytorch#136226: a pass of zeros finds out the shapes of what a stage returns, and its buffers change."""

    def _forward(self, action: Action) -> None:
        tried: set[int] = self.__dict__.setdefault("tried", set())
        if action.stage not in tried:
            received = self.exchange.arriving.get(action.as_kind(Kind.RECEIVE_FORWARD))
            given = self.inputs[action.micro_batch] if received is None else received[0]
            with torch.no_grad():
                self.modules[action.stage](*map(torch.zeros_like, given))
            tried.add(action.stage)
        super()._forward(action)


@defect(cause="subgroup", caught_by="test_any_number_of_micro_batches[TakesRanksForThoseOfTheWorld-pp2_dp2")
class TakesRanksForThoseOfTheWorld(Planted):
    """microsoft/onnxruntime#5815: a stage's neighbours are ranks of the world by the numbers that they have in the
    group."""

    def _run(self) -> None:
        isend, irecv = dist.isend, dist.irecv
        with (
            patch.object(dist, "isend", lambda tensor, group, group_dst: isend(tensor, group_dst)),
            patch.object(dist, "irecv", lambda tensor, group, group_src: irecv(tensor, group_src)),
        ):
            super()._run()


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[WritesIntoTargets-pp2-plain")
class WritesIntoTargets(Planted):
    """Targets that are left out are made valid ones in place, for the next step to count."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        total = super().step(inputs, targets)
        for target in targets:
            target.clamp_(min=0)
        return total


@defect(cause="memory", caught_by="test_forward_passes_are_held_as_long_as_stated[KeepsItsBatch")
class KeepsItsBatch(Planted):
    """Inputs and targets of a step are the runner's until the next one."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        self.batch = inputs, targets
        return super().step(inputs, targets)


@defect(cause="two calls", caught_by="test_steps_are_those_of_one_process[ReturnsOneTensor-pp2-plain")
class ReturnsOneTensor(Planted):
    """Every step writes its loss into the tensor that the steps before it returned."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        total = super().step(inputs, targets)
        returned: Tensor = self.__dict__.setdefault("returned", torch.empty_like(total))
        return returned.copy_(total)


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[DifferentiatesItsInputs-pp2-passes_on")
class DifferentiatesItsInputs(Planted):
    """The first stage's floats are made to need a gradient as others' are: the caller's own tensors."""

    def _forward(self, action: Action) -> None:
        for each in self.inputs[action.micro_batch] if action.stage == 0 else ():
            each.requires_grad_(each.is_floating_point())
        super()._forward(action)

"""Defects of pipelines' runners: passes, messages and gradients that are mixed up, lost, scaled or kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from correctness.support.planting import defect
from impl.pipeline import gpipe, one_forward_one_backward, planned, zero_bubble, zero_bubble_v
from impl.pipeline.actions import Action, Kind
from impl.pipeline.messages import receipt_for
from impl.pipeline.runner import Build, Loss, Runner, Tensors


class Planted(Runner):
    """Right: the suite's runner, as a runner of somebody's own."""

    schedule: Any = staticmethod(one_forward_one_backward)

    def __init__(
        self, build: Build, group: dist.ProcessGroup, micro_batches: int, *, loss: Loss, unequal: bool = False
    ) -> None:
        super().__init__(planned(type(self).schedule, group.size(), micro_batches), build, group, loss)


def parameters_of(runner: Runner) -> list[nn.Parameter]:
    return [parameter for module in runner.modules.values() for parameter in module.parameters()]


@defect(cause="gradients", caught_by="test_gradients_accumulate_and_are_not_scaled[ScalesInEachStep")
class ScalesInEachStep(Planted):
    """pytorch/torchtitan#1733: at the end of a step all that has accumulated is divided by its micro-batches."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        total = super().step(inputs, targets)
        for parameter in parameters_of(self):
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
        return total


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[DividesTheLoss-pp2-plain")
class DividesTheLoss(Planted):
    """areal-project/AReaL#1273: the schedule divides each loss by the number of micro-batches, which are weighted
    already."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        whole, self.loss = self.loss, lambda out, target: whole(out, target) / len(inputs)
        try:
            return super().step(inputs, targets) * len(inputs)
        finally:
            self.loss = whole


@defect(cause="state", caught_by="test_gradients_accumulate_and_are_not_scaled[BeginsAnew")
class BeginsAnew(Planted):
    """A step sets gradients to zero, so that those of the step before are lost."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        for parameter in parameters_of(self):
            parameter.grad = None
        return super().step(inputs, targets)


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[KeepsTheLoss-pp2-plain")
class KeepsTheLoss(Planted):
    """The rank of the last stage alone returns the loss."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        total = super().step(inputs, targets)
        return total if self.stages - 1 in self.modules else torch.zeros_like(total)


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[SendsTheLatestGradient-pp2-plain")
class SendsTheLatestGradient(Planted):
    """pytorch/pytorch#139404: a stage sends the gradient of the micro-batch that it has passed back last, for each."""

    schedule = staticmethod(lambda ranks, count: _late_sends(ranks, count))

    def _backward(self, action: Action) -> None:
        super()._backward(action)
        sends = [send for send in self.exchange.leaving if send.kind == Kind.SEND_BACKWARD]
        for send in sends[:-1]:
            self.exchange.leaving[send] = self.exchange.leaving[sends[-1]]


def _late_sends(ranks: int, count: int) -> list[list[Action]]:
    """GPipe, whose gradients are sent once all backward passes are done."""
    forwards = [[Action(rank, Kind.FORWARD, n) for n in range(count)] for rank in range(ranks)]
    found = []
    for rank, own in enumerate(forwards):
        actions: list[Action] = []
        for action in own:
            actions += [action.as_kind(Kind.RECEIVE_FORWARD)] if rank > 0 else []
            actions += [action, *([action.as_kind(Kind.SEND_FORWARD)] if rank < ranks - 1 else [])]
        actions += [action.as_kind(Kind.RECEIVE_BACKWARD) for action in own] if rank < ranks - 1 else []
        actions += [action.as_kind(Kind.BACKWARD) for action in own]
        actions += [action.as_kind(Kind.SEND_BACKWARD) for action in own] if rank > 0 else []
        found.append(actions)
    return found


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[ReceivesIntoOneBuffer-pp2-plain")
class ReceivesIntoOneBuffer(Planted):
    """deepspeedai/DeepSpeed#2800: a micro-batch is received into the buffer of one whose backward pass is to come."""

    schedule = staticmethod(gpipe)

    def _forward(self, action: Action) -> None:
        if action.stage > 0:
            receipt = action.as_kind(Kind.RECEIVE_FORWARD)
            tensors, handles = self.exchange.arriving[receipt]
            for handle in handles:
                handle.wait()
            buffers = self.__dict__.setdefault("buffers", {})
            for index, tensor in enumerate(tensors):
                buffers.setdefault((action.stage, index, tensor.shape), tensor).data.copy_(tensor)
            own = tuple(buffers[action.stage, index, each.shape].detach() for index, each in enumerate(tensors))
            self.exchange.arriving[receipt] = own, []
        super()._forward(action)


@defect(cause="handles", caught_by="test_steps_are_those_of_one_process[UsesBeforeItArrives-pp2")
class UsesBeforeItArrives(Planted):
    """Tensors are used without waiting for their receipt."""

    def _run(self) -> None:
        unwaited, arriving = self.__dict__.setdefault("unwaited", []), self.exchange.arriving
        self.exchange.wait_for = (  # type: ignore[method-assign]
            lambda action: unwaited.append(arriving.get(receipt_for(action)))  # which lets no message be taken back
        )
        super()._run()


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[SendsTheFirstGradient-pp2-several")
class SendsTheFirstGradient(Planted):
    """pytorch/pytorch#170277: of a stage with several outputs the first one alone gets a gradient."""

    def _backward(self, action: Action) -> None:
        receipt = action.as_kind(Kind.RECEIVE_BACKWARD)
        if receipt in self.exchange.arriving:
            tensors, handles = self.exchange.arriving[receipt]
            for handle in handles:
                handle.wait()
            self.exchange.arriving[receipt] = (tensors[0], *map(torch.zeros_like, tensors[1:])), []
        super()._backward(action)


@defect(cause="shapes", caught_by="test_micro_batches_may_differ_in_rows[TakesTheFirstShape-pp2-plain")
class TakesTheFirstShape(Planted):
    """The shapes of the first micro-batch hold for all."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        rows = len(inputs[0][0])
        cut = [tuple(each[:rows] for each in x) for x in inputs]
        return super().step(cut, [target[:rows] for target in targets])


@defect(cause="shapes", caught_by="test_micro_batches_may_differ_in_rows[WeightsMicroBatchesAlike-pp2-plain")
class WeightsMicroBatchesAlike(Planted):
    """pytorch/torchtitan#2206: a mean of means, here over micro-batches with other numbers of targets."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        counts = [int((target != -100).sum()) for target in targets]
        whole = self.loss
        mean = sum(counts) / len(counts)
        self.loss = lambda out, target: whole(out, target) * mean / int((target != -100).sum())
        try:
            return super().step(inputs, targets)
        finally:
            self.loss = whole


@defect(cause="memory", caught_by="test_forward_passes_are_held_as_long_as_stated[KeepsGraphs-pp2")
class KeepsGraphs(Planted):
    """Outputs, and with them their graphs, are kept until the next step."""

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        self.__dict__.setdefault("outputs", []).append(self.kept[action.stage, action.micro_batch][1])

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        self.__dict__.pop("outputs", None)
        return super().step(inputs, targets)


@defect(cause="errors", caught_by="test_an_error_in_a_stage_is_raised_on_its_rank[HidesErrors")
class HidesErrors(Planted):
    """An error in a stage ends the process without a word of it, so that others' waiting is all that is seen."""

    def _forward(self, action: Action) -> None:
        try:
            super()._forward(action)
        except Exception:
            raise RuntimeError("a stage failed") from None


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[TakesFrozenInputsForFrozenStages-pp2-frozen")
class TakesFrozenInputsForFrozenStages(Planted):
    """As PyTorch's zero-bubble schedules do (`docs/pytorch-defects.md`): behind a frozen stage nothing is trained."""

    def _backward(self, action: Action) -> None:
        x, outputs = self.kept[action.stage, action.micro_batch]
        if action.stage == 1 and not any(p.requires_grad for p in self._before(action.stage)):
            self.kept[action.stage, action.micro_batch] = x, tuple(out.detach() for out in outputs)
        super()._backward(action)

    def _before(self, stage: int) -> list[nn.Parameter]:
        """Parameters of the stage before, as they would be here."""
        return list(self.build(stage - 1, self.stages).parameters())

    def __init__(self, build: Build, *args: Any, **options: Any) -> None:
        self.build = build
        super().__init__(build, *args, **options)


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[TrainsFrozenWeights-pp2-frozen")
class TrainsFrozenWeights(Planted):
    """Weights' gradients that are found later are found of frozen weights too."""

    schedule = staticmethod(zero_bubble)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for module in self.modules.values():
            for layer in module.modules():
                if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
                    layer.weight.requires_grad_(True)
                    layer.weight.grad = torch.zeros_like(layer.weight)


class LatestInput(torch.autograd.Function):
    """A linear layer that keeps the input of its latest pass for the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, latest: dict[int, Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.latest = latest
        latest[id(weight)] = x.detach()
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        x = ctx.latest[id(weight)]
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


@defect(cause="two calls", caught_by="test_steps_are_those_of_one_process[KeepsTheLatestInput-pp2-plain")
class KeepsTheLatestInput(Planted):
    """A layer keeps its latest input for the gradient of its weight, while several micro-batches are under way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        latest: dict[int, Tensor] = {}
        for module in self.modules.values():
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    _keep_latest(layer, latest)


def _keep_latest(layer: nn.Linear, latest: dict[int, Tensor]) -> None:
    def forward(x: Tensor) -> Tensor:
        out = LatestInput.apply(x, layer.weight, latest)
        return out if layer.bias is None else out + layer.bias

    layer.forward = forward  # type: ignore[method-assign]


@defect(cause="two calls", caught_by="test_steps_are_those_of_one_process[DropsWhatIsLater-pp2-plain")
class DropsWhatIsLater(Planted):
    """The last micro-batch's products for gradients of weights are dropped with those of the one before it."""

    schedule = staticmethod(zero_bubble)

    def _weights(self, action: Action) -> None:
        if action.micro_batch == len(self.inputs) - 1:
            self.later[action.stage, action.micro_batch].products.clear()
        super()._weights(action)


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[RecomputesAlone-pp2-recomputed")
class RecomputesAlone(Planted):
    """Weights' gradients of stages that are recomputed come twice, of the pass and of its repetition."""

    schedule = staticmethod(zero_bubble)

    def _weights(self, action: Action) -> None:
        later = self.later[action.stage, action.micro_batch]
        if any(type(module).__name__ == "Recomputed" for module in self.modules.values()):
            later.products += later.products
        super()._weights(action)


@defect(
    cause="communication",
    caught_by="test_any_number_of_micro_batches[PassesOnItsOwnTensors-pp1",
)
class PassesOnItsOwnTensors(Planted):
    """Stages of one rank hand on their tensors without cutting the graph, and the later one passes back through
    both."""

    schedule = staticmethod(zero_bubble_v)

    def _forward(self, action: Action) -> None:
        stage, key = action.stage, (action.stage, action.micro_batch)
        if 0 < stage < self.stages - 1 or self.rank_of.get(stage - 1) != self.rank_of[stage]:
            super()._forward(action)
            return
        _, outputs = self.kept[stage - 1, action.micro_batch]
        loss = self.loss(self.modules[stage](*outputs), self.targets[action.micro_batch])
        self.total += loss.detach()
        self.kept[key] = outputs, (loss,)


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[SendsInFloat-pp2-plain")
class SendsInFloat(Planted):
    """Messages are in float32, whatever the stages compute in."""

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        for send, tensors in self.exchange.leaving.items():
            self.exchange.leaving[send] = tuple(
                each.float().to(each.dtype) if each.is_floating_point() else each for each in tensors
            )

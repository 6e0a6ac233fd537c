"""Defects of pipelines' runners as public trackers report: weights used twice, hooks on inputs, unused outputs,
messages and losses in a wrong dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from correctness.pipeline.wrong import Planted, parameters_of
from correctness.support.planting import defect
from impl.pipeline import zero_bubble
from impl.pipeline.actions import Action, Kind
from impl.pipeline.deferred import Later
from impl.pipeline.exchange import Exchange
from impl.pipeline.runner import Tensors


class _TwiceForEarlierUses(Later):
    def find(self) -> None:
        uses = [id(weight) for weight, _, _ in self.products]
        self.products += [
            use
            for index, use in enumerate(self.products)
            if id(use[0]) in uses[:index]  # backward meets the last first
        ]
        super().find()


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[CountsAnEarlierUseTwice-pp2-used_twice")
class CountsAnEarlierUseTwice(Planted):
    """pytorch/pytorch#180952: gradients of weights are found from where the weights are used, and a use that lies
    behind another one of the same weight is gone through twice."""

    schedule = staticmethod(zero_bubble)

    def _forward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        if key in self.later:
            self.later[key] = _TwiceForEarlierUses()
        super()._forward(action)


@defect(cause="state", caught_by="test_steps_are_those_of_one_process[KeepsItsInputs-pp2-hook_on_its_input")
class KeepsItsInputs(Planted):
    """pytorch/pytorch#185331: micro-batches of each step are received into the same tensors, whose hooks pile up."""

    def _forward(self, action: Action) -> None:
        self.action = action.stage, action.micro_batch
        super()._forward(action)

    def _as_inputs(self, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept: dict[Any, tuple[Tensor, ...]] = self.__dict__.setdefault("received", {})
        key = self.action, *((each.shape, each.dtype) for each in arrived)
        if key not in kept:
            kept[key] = super()._as_inputs(arrived)
        with torch.no_grad():
            for each, new in zip(kept[key], arrived, strict=True):
                each.copy_(new)
                each.grad = None
        return kept[key]


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[TheFirstDecides-pp2-sometimes")
class TheFirstDecides(Planted):
    """pytorch/pytorch#152827: gradients are passed on of those tensors that the first micro-batch gave one."""

    def _backward(self, action: Action) -> None:
        used: dict[int, list[bool]] = self.__dict__.setdefault("used", {})
        x, _ = self.kept[action.stage, action.micro_batch]
        leave = self.exchange.leave

        def as_the_first(action: Action, tensors: tuple[Tensor, ...]) -> None:
            own = used.setdefault(action.stage, [each.grad is not None for each in x])
            leave(action, tuple(t if has else torch.zeros_like(t) for t, has in zip(tensors, own, strict=True)))

        with patch.object(self.exchange, "leave", as_the_first):
            super()._backward(action)


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[SendsWholeNumbersAsFloats-pp2-several")
class SendsWholeNumbersAsFloats(Planted):
    """deepspeedai/DeepSpeed#969: all that a stage returns goes in one message, of the dtype of its first tensor."""

    def _forward(self, action: Action) -> None:
        leave = self.exchange.leave

        def in_one_dtype(action: Action, tensors: tuple[Tensor, ...]) -> None:
            leave(action, tuple(each.to(tensors[0].dtype).to(each.dtype) for each in tensors))

        with patch.object(self.exchange, "leave", in_one_dtype):
            super()._forward(action)


class _RoundsTheLoss(Planted):
    default: torch.dtype

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        dtype = next((parameter.dtype for parameter in parameters_of(self)), self.default)
        return super().step(inputs, targets).to(dtype)


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[RoundsTheLossWithoutParameters-pp2-without")
class RoundsTheLossWithoutParameters(_RoundsTheLoss):
    """deepspeedai/DeepSpeed#4726: a rank takes the loss to be of the dtype of its own stages' parameters, and where
    they have none, of PyTorch's default dtype."""

    default = torch.float32


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[RoundsTheLossToItsParameters-pp2-of_two")
class RoundsTheLossToItsParameters(_RoundsTheLoss):
    """The same, right where a stage has no parameters."""

    default = torch.float64


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class SendsGradientsInTheNarrowestDtype(Planted):
    """All gradients of a stage's inputs go back in one message, of the narrowest of their dtypes."""

    def _backward(self, action: Action) -> None:
        leave = self.exchange.leave

        def in_the_narrowest(action: Action, tensors: tuple[Tensor, ...]) -> None:
            narrowest = min((t for t in tensors if t.is_floating_point()), key=Tensor.element_size).dtype
            leave(action, tuple(t.to(narrowest).to(t.dtype) if t.is_floating_point() else t for t in tensors))

        with patch.object(self.exchange, "leave", in_the_narrowest):
            super()._backward(action)


@defect(cause="gradients", caught_by="test_any_history_is_that_of_one_process")
class TheFirstNeedsThem(Planted):
    """pytorch/pytorch#182182: tensors that need no gradient in a step's first micro-batch get none in any."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        self.needed: dict[int, list[bool]] = {}
        return super().step(inputs, targets)

    def _backward(self, action: Action) -> None:
        x, outputs = self.kept[action.stage, action.micro_batch]
        needed = self.needed.setdefault(action.stage, [out.requires_grad for out in outputs])
        kept = tuple(out if need else out.detach() for out, need in zip(outputs, needed, strict=True))
        self.kept[action.stage, action.micro_batch] = x, kept
        super()._backward(action)


@defect(cause="shapes", caught_by="test_any_history_is_that_of_one_process")
class ReceivesWithTheSameStrides(Planted):
    """Tensors are received in memory of the strides that they were sent with, one element for all where these are 0."""

    def _forward(self, action: Action) -> None:
        leave = self.exchange.leave

        def as_it_lay(action: Action, tensors: tuple[Tensor, ...]) -> None:
            leave(action, tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors))

        with patch.object(self.exchange, "leave", as_it_lay):
            super()._forward(action)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrived: Tensor) -> Tensor:
        ctx.received = arrived.view_as(arrived)
        return ctx.received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@defect(cause="memory", caught_by="test_forward_passes_are_held_as_long_as_stated[KnowsWhatItReceived")
class KnowsWhatItReceived(Planted):
    """InfiniTensor/InfiniTrain#148: a function of autograd keeps its output: all that is received is in a cycle."""

    def _as_inputs(self, arrived: Tensors) -> Tensors:
        return tuple(_received(each) if each.is_floating_point() else each for each in arrived)


def _received(arrived: Tensor) -> Tensor:
    received: Tensor = _Received.apply(arrived.detach().requires_grad_())
    received.retain_grad()
    return received


class _InOneDtype(Exchange):
    def leave(self, action: Action, tensors: Tensors) -> None:
        if self.autocast is not None and action.kind == Kind.FORWARD:
            tensors = tuple(each.to(self.autocast) if each.dtype == torch.float32 else each for each in tensors)
        super().leave(action, tensors)


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class SendsInTheDtypeOfAutocast(Planted):
    """NVIDIA/apex#1249: under autocast all messages have its dtype, also those of stages that return float32."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exchange = _InOneDtype(self.group, self.rank_of)
        self._does |= dict.fromkeys((Kind.SEND_FORWARD, Kind.SEND_BACKWARD), self.exchange.send)
        self._does |= dict.fromkeys((Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD), self.exchange.receive)

    def _backward(self, action: Action) -> None:
        if action.stage < self.stages - 1:  # gradients come in the dtype of the messages
            _, outputs = self.kept[action.stage, action.micro_batch]
            receipt = action.as_kind(Kind.RECEIVE_BACKWARD)
            tensors, handles = self.exchange.arriving[receipt]
            wide = tuple(gradient.to(out.dtype) for gradient, out in zip(tensors, outputs, strict=True))
            self.exchange.arriving[receipt] = wide, handles
        super()._backward(action)

"""Right pipelines that work in unusual ways: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from correctness.pipeline.wrong import Planted
from correctness.support.planting import right
from impl.pipeline import gpipe, interleaved, one_forward_one_backward, planned
from impl.pipeline.actions import Action, Kind
from impl.pipeline.runner import Tensors

Lists = list[list[Action]]


@right("GPipe whose backward passes come from the last micro-batch to the first")
def from_the_last(ranks: int, micro_batches: int) -> Lists:
    return [
        [action for action in actions if action.kind == Kind.FORWARD]
        + [action for action in reversed(actions) if action.kind == Kind.BACKWARD]
        for actions in gpipe(ranks, micro_batches)
    ]


@right("1F1B as texts, with its messages")
def as_texts(ranks: int, micro_batches: int) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in planned(one_forward_one_backward, ranks, micro_batches)]


@right("one micro-batch after the other, forward and backward")
def one_by_one(ranks: int, micro_batches: int) -> Lists:
    return [
        [Action(rank, kind, n) for n in range(micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        for rank in range(ranks)
    ]


@right("three stages of each rank, and the first ones of them next to one another")
def three_stages(ranks: int, micro_batches: int) -> Lists:
    return interleaved(ranks, micro_batches, 3)


@right("backward passes of odd micro-batches alone are cut in two, and their weights come at the end")
def cuts_some(ranks: int, micro_batches: int) -> Lists:
    found = []
    for rank, actions in enumerate(one_forward_one_backward(ranks, micro_batches)):
        odd = [action for action in actions if action.kind == Kind.BACKWARD and action.micro_batch % 2]
        cut = [action.as_kind(Kind.INPUT) if action in odd else action for action in actions]
        found.append(cut + [Action(rank, Kind.WEIGHT, action.micro_batch) for action in odd])
    return found


@right("a runner that trains micro-batches in the other order")
class Backwards(Planted):
    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        return super().step(inputs[::-1], targets[::-1])


@right("a runner that returns a number")
class ReturnsANumber(Planted):
    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Any:
        return super().step(inputs, targets).item()


@right("a runner whose gradients are added outside of autograd")
class AddsByHand(Planted):
    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        parameters = [p for module in self.modules.values() for p in module.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        total = super().step(inputs, targets)
        for parameter, known in zip(parameters, before, strict=True):
            if known is not None:
                with torch.no_grad():
                    parameter.grad = known if parameter.grad is None else parameter.grad + known
        return total

"""A part of the answers on scaling, the model and mesh that they are about, and what their tests share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from impl.accounting.feed_forward import FeedForwards
from impl.accounting.mesh import Mesh
from shardmark.report.tables import WIDTH
from shardmark.text import layout

GB = 10**9
MODEL = FeedForwards(blocks=126, dim=16_384, ffn_dim=53_248)
MESH = Mesh(fsdp=16, tensor=4, flops=4.6e14, bandwidth=2e10 * 9, fsdp_axes=2, tensor_axes=1)


@dataclass(frozen=True)
class Part:
    """A question, its answer in a sentence, the steps to it, and a table: its head, and rows."""

    question: str
    short: str
    answer: str
    steps: tuple[str, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> tuple[str, ...]:
        """Lines of the steps and the table, as the report shows them."""
        steps = (line for step in self.steps for line in textwrap.wrap(step, WIDTH, subsequent_indent="  "))
        return *steps, "", *layout([dict(zip(self.head, row, strict=True)) for row in self.rows], [self.head[0]])

    def markdown(self) -> Iterator[str]:
        """The part of the document."""
        yield from (f"## {self.question}", "", f"**{self.answer}**", "", *(f"- {step}" for step in self.steps), "")
        yield f"| {' | '.join(self.head)} |"
        yield f"|{'---|' * len(self.head)}"
        yield from (f"| {' | '.join(row)} |" for row in self.rows)


def asks(part: Part) -> pytest.MarkDecorator:
    """The mark of the tests that check this part."""
    return pytest.mark.question(part.question, short=part.short, answer=part.answer, derivation=part.lines())


def least(hides: Callable[[float], bool], most: float = 1e9) -> float:
    """The least number that hides, by bisection; `most` where none below does."""
    low, high = 0.0, most
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes that autograd saves for backward, without weights; each tensor counts once."""
    weights, kept = {id(weight) for weight in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights and not any(tensor._base is weight for weight in model.parameters()):
            kept[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad
    return sum(tensor.nbytes for tensor in kept.values())

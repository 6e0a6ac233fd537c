"""The team's training step: on all rows at once, and in micro-batches, which needs less memory."""

from dataclasses import dataclass

import torch
from torch import nn

from shardmark.api import Family, Race, add_family, register


@dataclass(frozen=True)
class StepCase:
    """A case; `str` of it is the test's id."""

    rows: int
    dim: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"r{self.rows}-d{self.dim}"


def make_model(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.ReLU(), nn.Linear(4 * dim, dim, bias=False))


def at_once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def in_micro_batches(model: nn.Module, x: torch.Tensor, parts: int = 4) -> None:
    for part in x.chunk(parts):
        (model(part).square().mean() / parts).backward()


# Shardmark needs the family and, for each implementation, its bytes at the peak and its peer in the race.


FLOAT = 4


def bytes_at_once(case: StepCase) -> int:
    """Peak, in ReLU's backward: rows, weights, the second weight's gradient; ReLU's output, and two gradients."""
    rows, weight = case.rows * case.dim, 4 * case.dim**2
    return FLOAT * (rows + 2 * weight + weight + 3 * 4 * rows)


def bytes_in_micro_batches(case: StepCase, parts: int = 4) -> int:
    """Peak, in ReLU's backward after the first part: rows, both weights and their gradients; a part of ReLU's three."""
    rows, weight = case.rows * case.dim, 4 * case.dim**2
    return FLOAT * (rows + 2 * weight + 2 * weight + 3 * 4 * rows // parts)


class Step:
    """`step(model, x)` leaves in each `.grad` the gradient of the mean square of model(x)."""


add_family(Family("step", Step, reference="at_once", check=lambda target, device: None))
register("step", "at_once", at_once, memory=bytes_at_once)
register("step", "in_micro_batches", in_micro_batches, memory=bytes_in_micro_batches, time=Race("at_once", budget=3.0))

"""Stages by what they take and return: several tensors, some of them not used, whole numbers, views, their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from correctness.pipeline.plain import Plain, width

LARGE = 2**60
"""Whole numbers near it are farther apart in float64."""


class Several(Plain):
    """A stage that returns three tensors: its values, those of the stage before, of which the next one uses the first
    column, and whole numbers that no floating-point number equals."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.last = stage == stages - 1

    def forward(self, x: Tensor, before: Tensor | None = None, numbers: Tensor | None = None) -> Any:
        numbers = x + LARGE if numbers is None else numbers
        out = super().forward(x)
        if before is not None:
            out = out * (1 + before[..., :1]) * (1 + 0.1 * (numbers - LARGE)[..., None])
        return out if self.last else (out, out.flip(-1), numbers)


class Sometimes(Several):
    """Uses the values of the stage before in some micro-batches alone, and not in the first."""

    def forward(self, x: Tensor, before: Tensor | None = None, numbers: Tensor | None = None) -> Any:
        numbers = x + LARGE if numbers is None else numbers
        return super().forward(x, before if (numbers - LARGE).sum() % 2 else None, numbers)


class NumbersFirst(Plain):
    """A stage that returns whole numbers, which no floating-point number equals, before its values: in a message of
    gradients, which the numbers lack, a value's place is another one."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.last = stage == stages - 1

    def forward(self, x: Tensor, values: Tensor | None = None) -> Any:
        numbers, x = (x + LARGE, x) if values is None else (x, values)
        out = super().forward(x) * (1 + 0.1 * (numbers - LARGE)[..., None])
        return out if self.last else (numbers, out)


class Views(Plain):
    """A stage that returns a view, whose rows do not lie one after the other."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.last = stage == stages - 1

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x if self.embedding is not None else x.transpose(0, 1))
        return out.view_as(out) if self.last else out.transpose(0, 1)


class PassesOn(Plain):
    """A stage that takes several tensors, and passes on some as they are: values that each stage uses, floats that need
    no gradient, and a mask. Its own values are what its last operation keeps for backward. A number, which has no rows,
    grows from stage to stage, and is a part of the loss."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.last = stage == stages - 1

    def forward(self, x: Tensor, scale: Tensor, *more: Tensor) -> Any:
        if self.embedding is not None:
            values = self.embedding(x)
            first, mask, number = values, x % 2 == 0, 0.1 * values.square().mean()
        else:
            values, (first, mask, number) = x, more
        own = (values * scale[:, None, None]).masked_fill(mask[..., None], 0.5) + first.mean(-1, keepdim=True)
        out = torch.tanh(self.passed(own))
        number = number + 0.1 * out.square().mean()
        return (out, number) if self.last else (out, scale, first, mask, number)


class Rotated(Plain):
    """A stage that rotates pairs of values by complex numbers, a buffer and a parameter, and returns complex ones."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        angles = torch.linspace(0.3, 3, width(stage) // 2)
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))
        self.trained = nn.Parameter(self.rotations.conj().resolve_conj() * 1.1)
        self.last = stage == stages - 1

    def forward(self, x: Tensor) -> Any:
        values = torch.view_as_complex(self.embedding(x).unflatten(-1, (-1, 2))) if self.embedding is not None else x
        out = self.passed(torch.view_as_real(values * self.rotations * self.trained).flatten(-2))
        return out if self.last else torch.view_as_complex(out.unflatten(-1, (-1, 2)))

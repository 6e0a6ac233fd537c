"""Parts of players that play each event on an implementation and on the same model in one process, its reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from correctness.engine.histories_on_ranks import Alike
from correctness.support.global_state import random_state_stays
from impl.distributed import local

WITHIN = 1e-9
"""Relative to the largest value of a tensor, in float64, after several steps."""
RATE, FACTOR = 0.02, 0.75


@dataclass(frozen=True)
class Event:
    """An event by its kind. A family's own class has `WORDS`, by kind."""

    WORDS: ClassVar[Mapping[str, str]]

    kind: str
    value: int = 0
    """A seed of a batch, or the number of a waiting call or of a parameter, modulo how many there are."""

    def __str__(self) -> str:
        return f"{self.kind}({self.value}): {self.WORDS[self.kind]}"


class Beside:
    """Has a method of each kind of event, which gets its value. Notes the first difference."""

    def __init__(self) -> None:
        self.is_refused = False
        """The implementation does not take such a model: no event says anything then."""
        self.after, self.wrong = 0, ""
        self.alike: list[Alike] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        """Results, and copies: users read them late."""

    def play(self, event: Event) -> None:
        self.after += 1
        if not self.is_refused:
            with random_state_stays(f"event {self.after}, {event},"):
                getattr(self, event.kind)(event.value)

    def problem(self) -> str:
        if not self.wrong and any(not torch.equal(result, copy) for result, copy in self.returned):
            return "an earlier result is another value now"
        return self.wrong

    def keep(self, result: Tensor) -> None:
        self.returned.append((result.detach(), result.detach().clone()))

    def differ(self, what: str, found: Tensor | None, expected: Tensor | None, within: float | None = None) -> None:
        """Note a difference, if it is the first; zeros may stand for no gradient."""
        if self.wrong:
            return
        if found is None or expected is None:
            if (expected is not None and expected.any()) or (found is not None and found.any()):
                self.wrong = f"{what} is {'missing' if found is None else 'there, and one process has none'}"
            return
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.wrong = f"{what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
            return
        error, largest = (found - expected).abs().max(), expected.abs().max().clamp(min=1e-3)
        if not error <= (WITHIN if within is None else within) * largest:
            self.wrong = f"{what} is off by {error / largest:.3g} of its largest value"


class ParametersChange(Beside):
    """Events by which callers change parameters and gradients, here and in the reference."""

    WORDS: ClassVar[Mapping[str, str]] = {
        "clear": "gradients to None",
        "zero": "gradients to zero, in place",
        "scale": "gradients scaled in place, as clipping does",
        "weights": "a parameter changed in place by the caller",
        "freeze": "a parameter frozen, or thawed",
        "mode": "train() or eval()",
    }

    @abstractmethod
    def both(self) -> dict[str, list[nn.Parameter]]:
        """By name: the reference's parameter, and this rank's part of it, if it has one."""

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The reference's, and this rank's."""

    def of_all(self, change: Callable[[nn.Parameter], object]) -> None:
        for parameters in self.both().values():
            for each in parameters:
                change(each)

    def of_one(self, value: int, change: Callable[[nn.Parameter], object]) -> None:
        every = sorted(self.both().items())
        for each in every[value % len(every)][1]:
            change(each)

    def clear(self, value: int) -> None:
        self.of_all(lambda p: setattr(p, "grad", None))

    def zero(self, value: int) -> None:
        self.multiply(0)

    def scale(self, value: int) -> None:
        self.multiply(FACTOR)

    def multiply(self, by: float) -> None:
        self.of_all(lambda p: None if p.grad is None else local(p.grad).mul_(by))

    def weights(self, value: int) -> None:
        self.of_one(value, lambda p: local(p.detach()).mul_(-FACTOR))

    def freeze(self, value: int) -> None:
        """Freeze a parameter, or thaw it; the last one that is trainable stays so."""
        trainable = [name for name, (reference, *_) in self.both().items() if reference.requires_grad]
        if [sorted(self.both())[value % len(self.both())]] != trainable:
            self.of_one(value, lambda p: p.requires_grad_(not p.requires_grad))

    def mode(self, value: int) -> None:
        for module in self.modules():
            module.train(bool(value % 2))

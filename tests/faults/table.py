"""A table of what may go wrong on a rank, each with what the user reads of it; tests take their faults from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

HUNG = 1.0
"""Seconds until a rank counts as hung, where it hangs."""
FAILS, WARNS, PASSES = "fails", "warns", "passes"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fault:
    """A function that ranks run, the outcome of its test, and a pattern of the message. `ranks` is a pattern too: of
    the ranks that it names."""

    function: Callable[..., Any]
    outcome: str
    says: str
    ranks: str
    deadline: float

    def pattern(self, size: int) -> str:
        """The pattern that the user's line must match."""
        if self.outcome == FAILS:
            return rf"rank {self.ranks} of {size} {self.says}"
        ranks = ", ".join(map(str, range(size))) if self.ranks != "1" else "1"
        return rf"{self.function.__name__} left on rank {ranks}: {self.says}"


FAULTS: dict[str, Fault] = {}


def fails(says: str, ranks: str = "1", deadline: float = 60.0) -> Callable[[Function], Function]:
    return _fault(FAILS, says, ranks, deadline)


def hangs(says: str, ranks: str = "1") -> Callable[[Function], Function]:
    return _fault(FAILS, rf"had not answered after \d+\.\d s; {says}", ranks, HUNG)


def warns(says: str, ranks: str = "all", restored: bool = True) -> Callable[[Function], Function]:
    return _fault(
        WARNS, f"{says} changed; restored" if restored else f"{says}; the next call gets new ranks", ranks, 60.0
    )


def passes() -> Callable[[Function], Function]:
    return _fault(PASSES, "", "all", 60.0)


def _fault(outcome: str, says: str, ranks: str, deadline: float) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        FAULTS[function.__name__] = Fault(function, outcome, says, ranks, deadline)
        return function

    return add


def names_of(outcome: str, *slow: str) -> list[Any]:
    """The faults of that outcome; those that take seconds are the sweep's."""
    names = [name for name, fault in FAULTS.items() if fault.outcome == outcome]
    return [pytest.param(name, marks=pytest.mark.sweep) if name in slow else name for name in names]


def on_rank_1() -> bool:
    return dist.get_rank() == 1


def meet() -> None:
    """The other ranks wait for rank 1, as in most tests."""
    dist.barrier()

"""The table of faults on ranks, each with the message that its user reads; tests take their faults from it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

HUNG = 1.0
"""Seconds until a rank counts as hung, where it hangs."""
LONG = 60.0
"""Seconds until any other rank counts as hung."""
FAILS, WARNS, PASSES = "fails", "warns", "passes"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fault:
    """A function that every rank calls, the outcome of its test, and patterns of the message and of the ranks in it."""

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


def fails(says: str, everywhere: bool = False, deadline: float = LONG) -> Callable[[Function], Function]:
    """The test fails. The function runs on rank 1, for which the other ranks wait; or on every rank."""
    return _fault(FAILS, says, r"\d" if everywhere else "1", everywhere, deadline)


def hangs(says: str, ranks: str = "1", everywhere: bool = False) -> Callable[[Function], Function]:
    """The test fails at its deadline. The function runs on rank 1, for which the other ranks wait; or on every rank."""
    return _fault(FAILS, rf"had not answered after \d+\.\d s; {says}", ranks, everywhere, HUNG)


def warns(says: str, everywhere: bool = True, restored: bool = True) -> Callable[[Function], Function]:
    """The test is warned. The function runs on every rank, or on rank 1 alone."""
    end = " changed; restored" if restored else "; the next call gets new ranks"
    return _fault(WARNS, says + end, "all" if everywhere else "1", everywhere)


def passes() -> Callable[[Function], Function]:
    """The test passes without a warning. The function runs on every rank."""
    return _fault(PASSES, "", "all", everywhere=True)


def _fault(
    outcome: str, says: str, ranks: str, everywhere: bool, deadline: float = LONG
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        @wraps(function)
        def on_ranks() -> Any:
            if everywhere or on_rank_1():
                return function()
            return meet() if outcome == FAILS else None

        FAULTS[function.__name__] = Fault(on_ranks, outcome, says, ranks, deadline)
        return on_ranks  # type: ignore[return-value]  # pickle finds it under the function's name

    return add


def names_of(outcome: str, *slow: str) -> list[Any]:
    """The faults of that outcome; those that take seconds are the sweep's."""
    names = [name for name, fault in FAULTS.items() if fault.outcome == outcome]
    return [pytest.param(name, marks=pytest.mark.sweep) if name in slow else name for name in names]


def on_rank_1() -> bool:
    return dist.get_rank() == 1


def meet() -> None:
    """Wait for rank 1, as the other ranks do in most tests."""
    dist.barrier()

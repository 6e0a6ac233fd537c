"""Implementations written to try the judge: wrong ones, each with the test that must fail on it, and right ones.

    @defect(cause="world size", caught_by="test_gradients_are_the_mean")
    class DividesByTwo(DataParallel): ...

    @right("float64 inside: one of many valid ways")
    def einsum_attention(q, k, v, *, is_causal=False): ...

`pytest correctness --impl data_parallel=correctness.data_parallel.wrong:DividesByTwo` judges one as a user's own.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import impl  # registers the families
from shardmark.api import FAMILIES

assert impl

CAUSES = (
    "world size",  # right on two ranks
    "shapes",  # right on small, even or typical shapes
    "numerics",  # dtypes, accumulation, overflow
    "masks",
    "two calls",  # right while no other call is under way
    "subgroup",  # right where the process group is the world
    "state",  # state of optimizers, buffers and parameters, saved and loaded
    "options",  # options that change nothing
    "handles",  # asynchronous work not waited for, or waited for early
    "communication",  # skipped, repeated, or of the wrong thing
    "memory",  # kept where the claim is a saving
    "random numbers",  # alike where they must differ, or the other way round
    "gradients",  # missing, extra, or of the wrong thing
    "errors",  # an invalid call is accepted
)
"""Reasons why a defect may slip through."""

CHECK = "the contract's check"
"""In place of a test: the family's own check refuses the defect before any test runs."""

Target = TypeVar("Target")


@dataclass(frozen=True)
class Planted:
    """Defect: its cause and a part of the ids of tests that must fail. Right implementation: why it is right."""

    family: str
    name: str
    cause: str = ""
    caught_by: str = ""
    why: str = ""

    @property
    def is_right(self) -> bool:
        return not self.cause


def defect(*, cause: str, caught_by: str) -> Callable[[Target], Target]:
    """Mark a wrong implementation of the family in whose folder its module lies."""
    assert cause in CAUSES, f"{cause!r} is none of {', '.join(CAUSES)}"
    return _planted(cause=cause, caught_by=caught_by)


def right(why: str) -> Callable[[Target], Target]:
    """Mark an unusual implementation that meets the contract."""
    return _planted(why=why)


def planted_in(module: str) -> list[Planted]:
    """Return what is planted in the module, in order of definition."""
    found = vars(importlib.import_module(module)).values()
    return [planted for target in found if (planted := of(target)) is not None and target.__module__ == module]


def of(target: Any) -> Planted | None:
    """Return what is planted on the target itself, not on a base class, or None."""
    return getattr(target, "__dict__", {}).get("planted")


def family_of(module: str) -> str:
    """Return the family whose folder holds the module: "optimizer" for correctness.optim.wrong."""
    folder = module.split(".")[-2]
    return next(name for name, each in FAMILIES.items() if each.folder == folder)


def _planted(**what: str) -> Callable[[Target], Target]:
    def mark(target: Target) -> Target:
        named: Any = target
        named.planted = Planted(family_of(named.__module__), named.__name__, **what)
        return target

    return mark

"""Implementations written to try the judge: wrong ones, each with the test that must fail on it, and right ones.

    @defect(cause="world size", caught_by="test_gradients_are_the_mean")
    class DividesByTwo(DataParallel): ...

    @right("float64 inside: one of many valid ways")
    def einsum_attention(q, k, v, *, is_causal=False): ...

`pytest correctness --impl data_parallel=correctness.defects.data_parallel:DividesByTwo` judges one as a user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardmark.registry import FAMILIES

CAUSES = (
    "world size",  # right on two ranks
    "shapes",  # right on small, even or typical shapes
    "numerics",  # dtypes, accumulation, overflow
    "masks",
    "two calls",  # right while no other call is under way
    "subgroup",  # right where the process group is the world
    "state",  # of optimizers, buffers and parameters, saved and loaded
    "options",  # options that change nothing
    "handles",  # asynchronous work not waited for, or waited for early
    "communication",  # skipped, repeated, or of the wrong thing
    "memory",  # kept where the claim is a saving
    "gradients",  # missing, extra, or of the wrong thing
    "errors",  # what must be refused is not
)
"""Why a defect may slip through."""

CHECK = "the contract's check"
"""Stands for a test: the family's own check refuses it before any test runs."""

Target = TypeVar("Target")


@dataclass(frozen=True)
class Planted:
    """What is wrong with an implementation, and a part of the ids of the tests that must see it; or why it is right."""

    family: str
    name: str
    cause: str = ""
    caught_by: str = ""
    why: str = ""

    @property
    def is_right(self) -> bool:
        return not self.cause


def defect(*, cause: str, caught_by: str) -> Callable[[Target], Target]:
    """Mark a wrong implementation of the family that its module's name begins with."""
    assert cause in CAUSES, f"{cause!r} is none of {', '.join(CAUSES)}"
    return _planted(cause=cause, caught_by=caught_by)


def right(why: str) -> Callable[[Target], Target]:
    """Mark an unusual implementation that meets the contract."""
    return _planted(why=why)


def planted_in(module: str) -> list[Planted]:
    """What the module has planted, in its order."""
    found = vars(importlib.import_module(module)).values()
    return [planted for target in found if (planted := of(target)) is not None and target.__module__ == module]


def of(target: Any) -> Planted | None:
    """What is planted in the target, if anything is: not what a class inherits."""
    return getattr(target, "__dict__", {}).get("planted")


def family_of(file: str) -> str:
    """The family that a file of planted implementations is named after: `loss.py`, `loss_of_tiles.py`."""
    if file == "optim" or file.startswith("optim_"):
        return "optimizer"
    return max((name for name in FAMILIES if file == name or file.startswith(f"{name}_")), key=len, default=file)


def _planted(**what: str) -> Callable[[Target], Target]:
    def mark(target: Target) -> Target:
        named: Any = target
        named.planted = Planted(family_of(named.__module__.rpartition(".")[2]), named.__name__, **what)
        return target

    return mark

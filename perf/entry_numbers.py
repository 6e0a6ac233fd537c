"""A run of an entry beside plain code: losses, norms, gradients, and what the steps have made of the parameters.

Tolerances are those of the house: the error of plain code in the same dtype, times two, where the right numbers are
those of a wider dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from perf.timed_entry import EntryCase

Samples = Mapping[str, np.ndarray]
"""Elements of tensors, by name; the same ones in every run."""
TWICE = 2.0
STRAY = 100
"""One of so many elements may be far off: Adam moves one whose gradient is rounding by a whole step, either way."""
HELD = 0.5
"""A tensor is held if less than this error is allowed; one that did not change has an error of 1."""


@dataclass
class Run:
    """Results of all steps of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reads: list[Samples] = field(default_factory=list)
    """Parameters before the first step, before the timed steps and after them."""
    gradients: Samples = field(default_factory=dict)
    """Gradients of the last step."""

    def tensors(self) -> dict[str, Samples]:
        """The tensors that are compared, by what they are, those nearest to the cause first."""
        changes = [
            {name: after[name] - before[name] for name in after if name in before and _alike(after, before, name)}
            for before, after in zip(self.reads, self.reads[1:], strict=False)
        ]
        names = "gradients of the last step", "changes in the warm-up steps", "changes in the timed steps"
        return dict(zip(names, [self.gradients, *changes], strict=False))


def complaints(found: Run, plain: Run, exact: Run, case: EntryCase) -> Iterator[str]:
    """A line for each number of the entry's that is not right; numbers of steps begin with the first warm-up, 0."""
    for name, right in exact.reads[0].items():
        if name not in found.reads[0] or not np.array_equal(found.reads[0][name], right):
            yield f"before the first step {name} is not what model_fn gives"
    for what, dtype in (("losses", "float32"), ("norms", case.dtype)):
        yield from _numbers(what, *(getattr(run, what) for run in (found, plain, exact)), _rounding(dtype))
    theirs, own, rounding = plain.tensors(), found.tensors(), _rounding(case.dtype)
    for what, right in exact.tensors().items():
        for name, expected in right.items():
            if name not in own[what] or own[what][name].shape != expected.shape:
                yield f"{what}: there are none of {name}"
            elif (allowed := _allowed(theirs[what][name], expected, rounding)) < HELD:
                error = off(own[what][name], expected)
                if not error <= allowed:
                    yield f"{what} of {name} are off by {error:.2g} of their size, and {allowed:.2g} is allowed"


def not_held(plain: Run, exact: Run, case: EntryCase) -> list[str]:
    """Tensors that are not held, as plain code rounds away what they should be, or most of it."""
    theirs, rounding = plain.tensors(), _rounding(case.dtype)
    return [
        f"{what} of {name}"
        for what, right in exact.tensors().items()
        for name, expected in right.items()
        if not _allowed(theirs[what][name], expected, rounding) < HELD
    ]


def off(found: np.ndarray, right: np.ndarray) -> float:
    """The 2-norm of the error over that of what is right, without the STRAY elements that are off most."""
    if not np.isfinite(found).all():
        return float("inf")
    errors = np.sort(np.square(found - right))
    error, size = errors[: len(errors) - len(errors) // STRAY].sum(), np.square(right).sum()
    return float(np.sqrt(error / size)) if size else float(error > 0)


def _rounding(dtype: str) -> float:
    """An error that plain code may lack by luck: a rounding to the dtype, or eight to float32."""
    return max(torch.finfo(getattr(torch, dtype)).eps / 2, 4 * torch.finfo(torch.float32).eps)


def _allowed(plain: np.ndarray, right: np.ndarray, rounding: float) -> float:
    return TWICE * off(plain, right) + rounding


def _numbers(
    what: str, found: Sequence[float], plain: Sequence[float], exact: Sequence[float], rounding: float
) -> Iterator[str]:
    usual = max(abs(a - b) for a, b in zip(plain, exact, strict=True))
    for step, (own, right) in enumerate(zip(found, exact, strict=True)):
        allowed = TWICE * usual + rounding * abs(right)
        if not abs(own - right) <= allowed:
            yield f"{what}: step {step} gives {own:.8g}, the reference {right:.8g}, and {allowed:.2g} is allowed"


def _alike(after: Samples, before: Samples, name: str) -> bool:
    return after[name].shape == before[name].shape

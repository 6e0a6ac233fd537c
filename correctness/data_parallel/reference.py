"""Expected gradients after each event of a history: every rank's in float64, with error bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from correctness.data_parallel.averaging import likeness


@dataclass
class Known:
    """An expected gradient in float64 (None: no gradient) and its error bound in its own dtype."""

    value: Tensor | None = None
    bound: Tensor | float = 0.0
    is_own: bool = False
    """True if a backward pass has added to it since the last average."""


def _in_float64(tensor: Tensor) -> Tensor:
    """Its numbers; of complex ones, the real and the imaginary parts as a last axis."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


class Gradients:
    """One parameter's gradients on every rank of a group. `narrowest`: the narrower of its dtype and the
    communication dtype, which is that of real gradients alone."""

    def __init__(self, dtype: torch.dtype, narrowest: torch.dtype, ranks: int) -> None:
        self.own, self.narrowest = torch.finfo(dtype), torch.finfo(narrowest)
        self.ranks = [Known() for _ in range(ranks)]
        self.averaged: list[Tensor | None] = []
        """The ranks' values before the last average."""

    def add(self, rank: int, terms: Sequence[Tensor]) -> None:
        """Add one backward pass: its terms are exact, and each addition is rounded once."""
        known = self.ranks[rank]
        for term in terms:
            value = _in_float64(term)
            if known.value is not None:
                known.bound = known.bound + self.own.eps * (known.value.abs() + value.abs()) + self._tiny(self.own)
                value = known.value + value
            known.value, known.is_own = value, True

    def zero(self, to_none: bool) -> None:
        for known in self.ranks:
            known.value = None if to_none or known.value is None else torch.zeros_like(known.value)
            known.bound, known.is_own = 0.0, False

    def average(self) -> None:
        """Average over the ranks. A rounded 1/n multiplies each term, or the sum, after rounding to the
        communication dtype; each of n - 1 additions is rounded: Higham, Accuracy and Stability, 4.2."""
        there = [known for known in self.ranks if known.value is not None]
        self.averaged = [known.value for known in self.ranks]
        if not there:
            return
        n = len(self.ranks)
        values = torch.stack([known.value for known in there])
        mean = values.sum(0) / n
        bounds = sum((known.bound for known in there), torch.zeros(())) / n
        unit = (n + 3) * max(self.narrowest.eps, self.own.eps) / 2
        tiny = n * (self._tiny(self.narrowest) + self._tiny(self.own))
        bound = bounds + unit / (1 - unit) * (values.abs().sum(0) / n + bounds) + tiny
        for known in self.ranks:
            known.value, known.bound, known.is_own = mean.clone(), bound, False

    def wrong(self, rank: int, found: Tensor | None, parameter: Tensor) -> str | None:
        """Describe what is wrong with that rank's `.grad`; None if nothing is."""
        known = self.ranks[rank]
        if known.value is None:
            there = found is not None and bool(found.any())
            return f"is {found.flatten()[:3].tolist()}, and no rank has one: None or zeros" if there else None
        local = any(other.is_own for other in self.ranks)
        what = "what this rank's passes in no_sync() added" if local else "the average over the ranks"
        if found is None:
            return f"is None, and not {what}" if known.value.any() else None
        if found.shape != parameter.shape or found.dtype != parameter.dtype:
            return f"has another shape or dtype: {tuple(found.shape)} of {found.dtype}"
        mine, expected = _in_float64(found.detach().cpu()), known.value
        bound = torch.where(expected.isfinite(), torch.as_tensor(known.bound, dtype=torch.float64), 0.0)
        bad = ~(((mine - expected).abs() <= bound) | (mine == expected) | (mine.isnan() & expected.isnan()))
        if not bad.any():
            return None
        where = tuple(bad.nonzero()[0].tolist())
        terms = torch.stack([torch.zeros_like(mine) if term is None else term for term in self.averaged or [None]])
        like = "" if local else likeness(mine, expected, terms, rank)
        return (
            f"is not {what}: {like}{int(bad.sum())} of {bad.numel()} elements are wrong\n"
            f"found {mine[where].item():.9g}, expected {expected[where].item():.9g} at {list(where)}"
        )

    @staticmethod
    def _tiny(number: torch.finfo) -> float:
        return number.smallest_normal * number.eps

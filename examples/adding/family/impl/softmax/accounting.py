"""Bytes at the peak of a softmax."""

from __future__ import annotations

from impl.softmax.cases import SoftmaxCase


def peak(case: SoftmaxCase) -> int:
    """The input, its exponential and their quotient, of 4 bytes an element; and the sum."""
    return 3 * 4 * case.elements + 4

"""The least-squares fit that shows how a peak grows with the sequence, and a time with bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def fit_polynomial(values: Mapping[int, float], degree: int) -> tuple[list[float], float]:
    """(coefficients, highest power first; largest relative miss) of the least-squares polynomial through positive
    values by size.

    Each value counts by its relative miss, so that the small sizes count too.
    """
    size, value = (np.array(column, dtype=np.float64) for column in zip(*sorted(values.items()), strict=True))
    coefficients = np.polyfit(size, value, degree, w=1 / value)
    return coefficients.tolist(), float(np.abs(np.polyval(coefficients, size) / value - 1).max())

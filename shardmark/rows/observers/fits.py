"""Least-squares fits, of a peak by sequence length or a time by size; the lines that show the peaks'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 4
"""Fewest lengths to fit: three coefficients fit three lengths without a miss."""


def fit_polynomial(values: Mapping[int, float], degree: int) -> tuple[list[float], float]:
    """(coefficients, highest power first; largest relative miss) of the least-squares polynomial through positive
    values by size.

    Each value counts by its relative miss, so that the small sizes count too.
    """
    size, value = (np.array(column, dtype=np.float64) for column in zip(*sorted(values.items()), strict=True))
    coefficients = np.polyfit(size, value, degree, w=1 / value)
    return coefficients.tolist(), float(np.abs(np.polyval(coefficients, size) / value - 1).max())


def peaks_by_length(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each implementation and kind of case that was metered at enough lengths."""
    groups: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for entry in entries:
        row = entry["extra_info"]
        case = row["case"]
        if "seq" in case and "tensors" in row["memory"]:
            kind = case["id"].replace(f"-s{case['seq']}-", "-")
            groups[kind, row["implementation"]][case["seq"]] = row["memory"]["tensors"]
    fitted = {group: fit_polynomial(peaks, degree=2) for group, peaks in groups.items() if len(peaks) >= POINTS}
    if fitted:
        yield ""
        width = max(len(f"{kind}  {implementation}") for kind, implementation in fitted)
    for (kind, implementation), ((quadratic, linear, constant), miss) in fitted.items():
        label = f"{kind}  {implementation}".ljust(width)
        formula = f"{round(quadratic, 2) + 0.0:,.2f} seq² {round(linear):+,} seq {round(constant):+,}"  # no "-0"
        yield f"{label}  tensors at the peak = {formula} bytes (misses by {miss:.1%} at most)"

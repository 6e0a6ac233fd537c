"""Least-squares fits: the quadratic and linear parts of a peak by sequence length, and the fixed part of a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

POINTS = 4
"""Fewest lengths for a fit of three coefficients whose miss means something."""


def fit_peaks(peaks: dict[int, int]) -> tuple[list[float], float]:
    """([bytes per seq², bytes per seq, bytes], largest relative miss) of the least-squares fit to peaks by seq.

    Each peak counts by its relative miss, so that the short sequences count too.
    """
    seq, peak = (np.array(values, dtype=np.float64) for values in zip(*sorted(peaks.items()), strict=True))
    terms = np.stack([seq**2, seq, np.ones_like(seq)], axis=1) / peak[:, None]
    coefficients, *_ = np.linalg.lstsq(terms, np.ones_like(peak), rcond=None)
    return coefficients.tolist(), float(np.abs(terms @ coefficients - 1).max())


def fit_line(values: dict[int, float]) -> tuple[float, float, float]:
    """(value at 0, slope, largest relative miss) of the least-squares line through positive values by size.

    Each value counts by its relative miss, so that the small sizes count too.
    """
    size, value = (np.array(column, dtype=np.float64) for column in zip(*sorted(values.items()), strict=True))
    terms = np.stack([np.ones_like(size), size], axis=1) / value[:, None]
    (constant, slope), *_ = np.linalg.lstsq(terms, np.ones_like(value), rcond=None)
    return float(constant), float(slope), float(np.abs(terms @ [constant, slope] - 1).max())


def peaks_by_length(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each implementation and kind of case that was metered at enough lengths."""
    groups: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for entry in entries:
        row = entry["extra_info"]
        case = row["case"]
        if "seq" in case and "tensors" in row["memory"]:
            kind = case["id"].replace(f"-s{case['seq']}-", "-")
            groups[kind, row["implementation"]][case["seq"]] = row["memory"]["tensors"]
    fitted = {group: fit_peaks(peaks) for group, peaks in groups.items() if len(peaks) >= POINTS}
    if fitted:
        yield ""
        width = max(len(f"{kind}  {implementation}") for kind, implementation in fitted)
    for (kind, implementation), ((quadratic, linear, constant), miss) in fitted.items():
        label = f"{kind}  {implementation}".ljust(width)
        formula = f"{round(quadratic, 2) + 0.0:,.2f} seq² {round(linear):+,} seq {round(constant):+,}"  # no "-0"
        yield f"{label}  tensors at the peak = {formula} bytes (misses by {miss:.1%} at most)"

"""Fits of peak memory to sequence length, and the lines they make under a table."""

from typing import Any

from shardmark.rows.observers import PeakByLength
from shardmark.rows.observers.fits import fit_polynomial

LENGTHS = (128, 256, 512, 1024)


def _entry(seq: int, peak: int, implementation: str = "eager") -> dict[str, Any]:
    case = {"id": f"b2-s{seq}-d64-full", "seq": seq}
    return {"extra_info": {"case": case, "implementation": implementation, "memory": {"tensors": peak}}}


def test_what_is_no_polynomial_misses_small_sizes_no_more_than_large_ones() -> None:
    _, miss = fit_polynomial({seq: seq**3 for seq in LENGTHS}, degree=2)
    assert 0.1 < miss < 0.2


def test_each_implementation_and_kind_of_case_has_a_line() -> None:
    entries = [_entry(seq, 24 * seq**2 + 3072 * seq + 77) for seq in LENGTHS]
    entries += [_entry(seq, 5000 * seq, "flash") for seq in LENGTHS]
    assert list(PeakByLength().lines(entries)) == [
        "",
        "b2-d64-full  eager  tensors at the peak = 24.00 seq² +3,072 seq +77 bytes (misses by 0.0% at most)",
        "b2-d64-full  flash  tensors at the peak = 0.00 seq² +5,000 seq +0 bytes (misses by 0.0% at most)",
    ]


def test_too_few_lengths_and_rows_without_a_peak_have_none() -> None:
    not_started = _entry(2048, 0)
    del not_started["extra_info"]["memory"]["tensors"]
    assert not list(PeakByLength().lines([*(_entry(seq, seq) for seq in LENGTHS[:3]), not_started]))

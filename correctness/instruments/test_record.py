"""Keeping a GPU's rows: newer ones take the place of older ones of the same test, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from perf.record import ROOT, merged


def _rows(**rows: int) -> list[dict[str, object]]:
    return [{"fullname": name, "value": value} for name, value in rows.items()]


def test_rows_of_other_tests_stay() -> None:
    older = {"machine_info": "old", "benchmarks": _rows(a=1, b=1), "unmeasured": _rows(c=1)}
    newer = {"machine_info": "new", "benchmarks": _rows(b=2, c=2), "unmeasured": _rows(d=2)}
    assert merged(older, newer) == {
        "machine_info": "new",
        "benchmarks": _rows(a=1, b=2, c=2),
        "unmeasured": _rows(d=2),
    }


def test_a_first_record_is_the_run() -> None:
    newer = {"benchmarks": _rows(a=1), "unmeasured": []}
    assert merged({}, newer) == newer


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_one_line() -> None:
    run = subprocess.run([sys.executable, str(ROOT / "perf" / "record.py")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 4 and run.stderr == "perf/record.py records what a GPU does, and there is none\n"

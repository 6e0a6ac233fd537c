"""The table of docs/layers.md is that of the formulas."""

import pytest

from correctness.support.paths import ROOT
from impl.layers.accounting import eager_peak, fused_triton_peak, work
from impl.layers.cases import WIDTHS, LayersCase
from shardmark.meter.hardware import hardware


@pytest.mark.parametrize("operation", WIDTHS)
def test_the_pages_figures_are_those_of_the_formulas(operation: str) -> None:
    case = LayersCase(operation, 8192, WIDTHS[operation], "bfloat16", head_dim=128)
    moved = work(case).bytes_moved
    mib = " | ".join(f"{nbytes / 2**20:,.0f}" for nbytes in (eager_peak(case), fused_triton_peak(case), moved))
    least = moved / hardware("h100-80gb").bandwidth * 1e3
    row = f"| `{operation}` | {case.dim:,} | {mib} | {least:.2f} ms |"
    assert row in (ROOT / "docs" / "layers.md").read_text().splitlines()

"""The roofline: published peaks by name, measured rates, and the row's fractions of them."""

import time
from collections.abc import Iterator

import pytest
import torch

from shardmark.api.work import Work
from shardmark.meter.roofline import Roofline, attainable_flops, measure_roofline, published_peak
from shardmark.rows.fill import limit_entry


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 311.9e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10", None),
        ("Some CPU", None),
    ],
)
def test_a_name_tells_the_published_peak(name: str, peak: float | None) -> None:
    assert published_peak(name, torch.bfloat16) == published_peak(name, torch.float16) == peak


@pytest.mark.usefixtures("precision")
def test_float32_products_count_as_what_they_are_allowed_to_be() -> None:
    torch.set_float32_matmul_precision("highest")
    assert published_peak("NVIDIA H100 80GB HBM3", torch.float32) == 66.9e12
    torch.set_float32_matmul_precision("high")
    assert published_peak("NVIDIA H100 80GB HBM3", torch.float32) == 494.7e12


def test_a_narrow_dtype_without_a_published_peak_has_at_least_the_rate_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise code that converts to float32 would exceed 100%."""
    monkeypatch.setattr(torch, "matmul", lambda a, b: time.sleep(0.01 if a.dtype == torch.float32 else 0.1))
    most = 2 * 1024**3 / 0.1  # of a product that takes so long
    rates = measure_roofline("cpu", torch.float16)
    assert rates.peak_flops_per_second == rates.flops_per_second > most
    assert measure_roofline("cpu", torch.float64).flops_per_second <= most


def test_waiting_for_a_core_makes_the_attainable_rate_no_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a correct step in a quiet moment would be accused of leaving out work."""
    product = torch.matmul
    quiet = attainable_flops("cpu", torch.float32)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "matmul", lambda a, b: (time.sleep(0.2), product(a, b)))
    assert measure_roofline("cpu", torch.float32).flops_per_second < 2 * 1024**3 / 0.2
    assert attainable_flops("cpu", torch.float32) > quiet / 4
    assert torch.get_num_threads() == threads


def test_a_row_tells_the_fraction_of_the_roofline_and_of_the_published_peak() -> None:
    rates = Roofline(flops_per_second=100.0, bytes_per_second=10.0, peak_flops_per_second=400.0)
    entry = limit_entry(Work(flops=1000, bytes_moved=10, model_flops=800), rates, devices=2, seconds=20.0)
    assert entry["seconds"] == 1000 / 100 / 2
    assert entry["fraction"] == 5 / 20
    assert entry["mfu"] == 800 / (20 * 2 * 400)
    assert "mfu" not in limit_entry(Work(flops=1000), rates, devices=1, seconds=20.0)

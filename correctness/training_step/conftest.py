"""Restore global settings that a wrong step leaves changed, so that only its own tests fail."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def switches(device: str) -> Iterator[None]:
    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the contract's check has made a step already
    yield
    torch.set_float32_matmul_precision(products)
    torch.set_autocast_enabled(device, False)

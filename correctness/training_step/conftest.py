"""What a wrong step leaves switched on is switched off again, so that only its own tests fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def switches(device: str) -> Iterator[None]:
    products = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(products)
    torch.set_autocast_enabled(device, False)

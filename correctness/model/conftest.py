"""Float64 as the default dtype of these tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Default dtype float64, also for the tables of sines and cosines."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

"""Another default dtype, as `torch.set_default_dtype` makes it for a whole job."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

OTHERS = (torch.bfloat16, torch.float64)
"""A dtype in which float32 numbers are rounded, and one that meets them where a tensor is made without a dtype."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors without a dtype of their own have this one in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

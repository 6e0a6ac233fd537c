"""Parameters and gradients that are the same on every rank, and a helper that reports what a call raises."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from correctness.support.exact import exact


def raised(call: Callable[[], Any]) -> str:
    """Return the type and message of the error that the call raises, or "nothing"."""
    try:
        call()
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def parameters(device: str, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Random parameters, the same on every rank, by default in the dtype of exact checks."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [nn.Parameter(values.to(device, dtype or exact())) for values in drawn]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)

"""A wrong result in words: its worst element, and the known mistake that it equals."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CLOSE = 0.02
"""Largest difference from a mistake's result, as a share of the mistake's own error: a wrong result that is so near to
one has made it."""


def worst_element(found: Tensor, exact: Tensor) -> str:
    """As in "at [0, 3] it is 1.25, expected 1.5", where the error is largest."""
    if not exact.numel():
        return ""
    error = (found.double() - exact).abs().nan_to_num(torch.inf)
    at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    here = tuple(at)
    return f"at {at} it is {found[here].item():.7g}, expected {exact[here].item():.7g}"


def likeness(found: Tensor, exact: Tensor, mistakes: Mapping[str, Callable[[], Tensor]]) -> str:
    """The mistake that has this result, as in "; it is that without the causal mask", or "". All are in float64."""
    for name, result in mistakes.items():
        wrong = result()
        own, off = (wrong - exact).norm(), (found.double() - wrong).norm()
        if own > 0 and off <= CLOSE * own:
            return f"; it is that {name}"
    return ""

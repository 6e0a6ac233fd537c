"""The contract of softmax, the check that a target meets it, and the family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from impl.softmax.accounting import peak
from shardmark.api import Family, Race, RegistryError, add_family


class Softmax(Protocol):
    """`softmax(x)` of x's shape and dtype: each row of the last dimension sums to one. Bridle, 1990."""

    def __call__(self, x: Tensor) -> Tensor: ...


def check(target: Any, device: str) -> None:
    """RegistryError, in one line, where the target is no function."""
    if not callable(target):
        raise RegistryError(f"it is of type {type(target).__name__}, and a softmax is called with one tensor")


add_family(Family("softmax", Softmax, "naive", check, memory=peak, time=Race("naive")))

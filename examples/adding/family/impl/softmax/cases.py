"""Cases of the softmax family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SoftmaxCase:
    """One softmax of so many elements."""

    elements: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.elements}-{self.dtype}"

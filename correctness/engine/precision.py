"""Precisions of random histories: exact ones, parameters in few bits, and float32 under the caller's autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters, whether the caller's autocast to bfloat16 is around calls, and how near gradients are to
    those of one process, relative to a tensor's largest value. In few bits that is wide, as roundings of sums that
    cancel differ by their order: exact histories find wrong sums; these find missing gradients, wrong dtypes and lost
    autocast."""

    dtype: torch.dtype = torch.float64
    autocast: bool = False
    within: float | None = None

    @property
    def of_losses(self) -> float | None:
        """How near losses are: they are added in float32 at least, and a sum in bfloat16 is further off."""
        return None if self.within is None else 2**-10

    def around(self, device: str) -> AbstractContextManager[object]:
        return torch.autocast(torch.device(device).type, torch.bfloat16) if self.autocast else nullcontext()

    def __str__(self) -> str:
        return "float32 under autocast" if self.autocast else str(self.dtype).removeprefix("torch.")


EXACT = Precision()
FEW_BITS = 0.5
PRECISIONS = (Precision(torch.bfloat16, within=FEW_BITS), Precision(torch.float32, True, FEW_BITS))


def precisions() -> st.SearchStrategy[Precision]:
    return st.sampled_from((*[EXACT] * 3, *PRECISIONS))

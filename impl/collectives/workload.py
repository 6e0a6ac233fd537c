"""One collective of each rank's tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from impl.collectives.cases import CollectiveCase, calls
from shardmark.api import Implementation, Mark


class Collective:
    """An all-reduce in place, or one of the others out of place. Its time is that of one of several calls."""

    def __init__(self, implementation: Implementation, case: CollectiveCase, device: str) -> None:
        self.backend = dist.get_backend()
        self.calls = calls(case.size, device)
        large, small = case.elements, case.elements // case.ranks
        arguments = {"all_reduce": [large], "reduce_scatter": [small, large], "all_gather": [large, small]}
        self.tensors = [torch.zeros(elements, device=device) for elements in arguments[case.collective]]
        self.collective = getattr(implementation.adapted, case.collective)

    def prepare(self) -> None:
        """Nothing to reset: sums of zeros are zeros."""

    def step(self, mark: Mark) -> None:
        """One collective."""
        self.collective(*self.tensors)

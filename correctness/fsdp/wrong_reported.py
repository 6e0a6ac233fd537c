"""Planted defects: full sharding that is wrong where several models are made."""

from typing import Any, ClassVar

import torch
from torch import nn

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect


@defect(cause="two calls", caught_by="test_each_model_has_its_own_compute_dtype")
class TheLastComputeDtypeHoldsForAll(SmallFSDP):
    """Keeps the compute dtype in the class: the last wrapper's holds for every other."""

    chosen: ClassVar[torch.dtype | None] = None

    def __init__(self, module: nn.Module, *, compute_dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(module, compute_dtype=compute_dtype, **options)
        type(self).chosen = compute_dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return type(self).chosen

    @compute_dtype.setter
    def compute_dtype(self, value: torch.dtype | None) -> None: ...

"""Planted defects of fully sharded models that show by what is around a call: autocast, an evaluation that is first."""

from typing import Any

import torch
from torch import Tensor

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect

HISTORY = "test_any_history_is_as_without_sharding"


@defect(cause="numerics", caught_by=HISTORY)
class ReducesInAutocastsDtype(SmallFSDP):
    """Takes autocast for a compute dtype: gradients of a backward pass under it are communicated in bfloat16."""

    def begin_reduce(self, shard: torch.nn.Parameter, gradient: Tensor) -> None:
        narrow = gradient.is_floating_point() and torch.is_autocast_enabled(gradient.device.type)
        super().begin_reduce(shard, gradient.bfloat16() if narrow else gradient)


@defect(cause="numerics", caught_by=HISTORY)
class RunsWithoutAutocast(SmallFSDP):
    """Has its own precision alone: the module does not run under the caller's autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super().forward(*args, **kwargs)


@defect(cause="state", caught_by=HISTORY)
class LearnsFromItsFirstCall(SmallFSDP):
    """Notes in its first call which outputs have gradients to wait for: none, where a trainer tries its validation."""

    learns: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.learns is None:
            self.learns = torch.is_grad_enabled()
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)

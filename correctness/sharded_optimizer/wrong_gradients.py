"""Planted defects of sharded optimizers that show by gradients that a rank lacks, by few bits and under autocast."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from correctness.sharded_optimizer.simple_zero import SimpleZero
from correctness.support.planting import defect

HISTORY = "test_any_history_is_as_without_sharding"


class Averages(SimpleZero):
    """Right: averages gradients itself, after backward."""

    def __init__(self, *args: Any, average_gradients: bool = False, **options: Any) -> None:
        self.averages = average_gradients
        super().__init__(*args, **options)

    def finish_gradient_synchronization(self) -> None:
        for p in self.all_parameters if self.averages else ():
            there = torch.tensor(float(p.grad is not None))
            dist.all_reduce(there, group=self.process_group)
            if there and p.requires_grad:
                p.grad = self.average(torch.zeros_like(p) if p.grad is None else p.grad, there)

    def average(self, gradient: Tensor, there: Tensor) -> Tensor:
        """The average of the ranks' gradients, of which as many are `there`."""
        dist.all_reduce(gradient, group=self.process_group)
        return gradient / self.ranks


@defect(cause="gradients", caught_by=HISTORY)
class DividesByThoseWhoHaveOne(Averages):
    """A gradient that a rank lacks does not count as zero."""

    def average(self, gradient: Tensor, there: Tensor) -> Tensor:
        return super().average(gradient, there) * self.ranks / there


@defect(cause="numerics", caught_by=HISTORY)
class AveragesInAutocastsDtype(Averages):
    """Where the caller's autocast is around a step, gradients are communicated in its dtype."""

    def average(self, gradient: Tensor, there: Tensor) -> Tensor:
        sent = gradient.bfloat16() if torch.is_autocast_enabled(gradient.device.type) else gradient
        return super().average(sent, there).to(gradient.dtype)


@defect(cause="state", caught_by=HISTORY)
class SavesFewBitsInFloat32(SimpleZero):
    """Moments of bfloat16 parameters are saved in float32."""

    def own_state(self) -> dict[int, Any]:
        saved = super().own_state()
        return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x, saved)

"""Planted defects of sharded optimizers that show by gradients that a rank lacks, by few bits and under autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero
from correctness.support.planting import defect

HISTORY = "test_any_history_is_as_without_sharding"


class Averages(SimpleZero):
    """Right: averages gradients itself, after backward."""

    def __init__(self, *args: Any, average_gradients: bool = False, **options: Any) -> None:
        self.averages = average_gradients
        super().__init__(*args, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

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


@defect(cause="gradients", caught_by=HISTORY)
class AveragesWhatTheLastPassReached(Averages):
    """Gradients that came in `no_sync` alone, and not in the last pass, stay each rank's own."""

    reached: frozenset[Tensor] = frozenset()
    synchronizes = True

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        for p in (p for p in self.param_groups[-1]["params"] if p.requires_grad):
            p.register_post_accumulate_grad_hook(self.note)

    def note(self, p: Tensor) -> None:
        self.reached |= {p} if self.synchronizes else set()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizes = False
        yield
        self.synchronizes = True

    def finish_gradient_synchronization(self) -> None:
        own = {p: p.grad for p in self.all_parameters if p not in self.reached}
        for p in own:
            p.grad = None
        super().finish_gradient_synchronization()
        for p in (p for p in own if p.grad is None):
            p.grad = own[p]
        self.reached = frozenset()


@defect(cause="numerics", caught_by=HISTORY)
class LeavesUnscalingToTheInner(SimpleZero):
    """A `GradScaler` is told that the optimizer unscales, as the fused one inside does, which is given no scale."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(self.inner is not None and getattr(self.inner, "_step_supports_amp_scaling", False))

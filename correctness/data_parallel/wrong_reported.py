"""Planted defects: data-parallel wrappers that are wrong as public trackers report."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect


@defect(cause="state", caught_by="test_leaving_an_inner_no_sync")
class InnerNoSyncSwitchesOn(Plain):
    """InfiniTrain/InfiniTrain#213: leaving an inner `no_sync` switches synchronization on."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True


@defect(cause="state", caught_by="test_a_module_may_be_wrapped_again_once_its_wrapper_is_deleted")
class HooksOfADeletedWrapperStay(Overlapped):
    """Hooks on parameters outlive their wrapper, and sum beside those of the next one."""

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing:
            dist.all_reduce(parameter.grad, group=self.group)
            self.ready.add(parameter)

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            for p in self.order:
                if p not in self.ready:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad, group=self.group)
                p.grad.div_(self.size)
            self.ready.clear()

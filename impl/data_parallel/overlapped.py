"""One all-reduce for each parameter, as soon as backward has its gradient: communication overlaps computation."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from impl.data_parallel.accounting import naive_peak
from impl.data_parallel.base import DataParallel, gradient, row_major
from impl.distributed import backward_twice
from shardmark.api import Race, register


class OverlappedDataParallel(DataParallel):
    """No gradient that is contiguous is copied, and each parameter costs the latency of a collective.

    Every rank launches the collectives in the reverse order of the parameters, whichever gradients arrive first, so
    that the ranks' collectives match.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group=process_group)
        self._order = self.trainable[::-1]  # backward runs from the last layer to the first
        self._ready: set[nn.Parameter] = set()
        self._handles: list[dist.Work] = []  # handles of the first len(_handles) parameters in `_order`
        self._totals: list[Tensor] = []  # the tensors being reduced: gradients, row-major

    def _average(self) -> None:
        while len(self._handles) < len(self._order):
            self._launch_next()
        for parameter, handle, total in zip(self._order, self._handles, self._totals, strict=True):
            handle.wait()
            if total is not parameter.grad:
                gradient(parameter).copy_(total)
            gradient(parameter).div_(self.world_size)
        self._ready.clear()
        self._totals.clear()
        self._handles.clear()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        super()._on_gradient(parameter)
        if parameter in self._ready:  # autograd has just added to a gradient that is being communicated
            raise backward_twice()
        if not self.synchronizing:
            return
        self._ready.add(parameter)
        while len(self._handles) < len(self._order) and self._order[len(self._handles)] in self._ready:
            self._launch_next()

    def _launch_next(self) -> None:
        self._totals.append(row_major(gradient(self._order[len(self._handles)])))
        self._handles.append(dist.all_reduce(self._totals[-1], group=self.process_group, async_op=True))


register(
    "data_parallel",
    "overlapped",
    OverlappedDataParallel,
    memory=naive_peak,
    time=Race("naive", budget=2.0, goal=1.0),
    tested_briefly=True,
    called="overlapped data parallelism",
)

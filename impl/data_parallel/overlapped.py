"""One all-reduce a parameter, begun as soon as backward has its gradient: communication hides behind computation."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from impl.data_parallel.accounting import overlapped_peak
from impl.data_parallel.base import DataParallel, backward_twice, gradient
from shardmark.registry import Race, register


class OverlappedDataParallel(DataParallel):
    """No copies, and a latency for every parameter.

    Collectives are launched in the reverse order of the parameters on every rank, whichever gradients come first, so
    that the ranks' collectives match.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group=process_group)
        self._order = self.trainable[::-1]  # backward runs from the last layer to the first
        self._ready: set[nn.Parameter] = set()
        self._works: list[dist.Work] = []  # of the first len(_works) parameters in order

    def _average(self) -> None:
        while len(self._works) < len(self._order):
            self._launch_next()
        for parameter, work in zip(self._order, self._works, strict=True):
            work.wait()
            gradient(parameter).div_(self.world_size)
        self._ready.clear()
        self._works.clear()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        super()._on_gradient(parameter)
        if parameter in self._ready:  # or, even in no_sync, it was added to what is being communicated
            raise backward_twice()
        if not self.synchronizing:
            return
        self._ready.add(parameter)
        while len(self._works) < len(self._order) and self._order[len(self._works)] in self._ready:
            self._launch_next()

    def _launch_next(self) -> None:
        tensor = gradient(self._order[len(self._works)])
        self._works.append(dist.all_reduce(tensor, group=self.process_group, async_op=True))


register(
    "data_parallel",
    "overlapped",
    OverlappedDataParallel,
    memory=overlapped_peak,
    time=Race("naive", budget=2.0, goal=1.0),
)

"""Base of the four wrappers: equal parameters on every rank at the start, `no_sync`, and a plain `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.distributed import (
    PlainStateDict,
    broadcast_state,
    call_on_gradient,
    check_before_steps,
    check_same_module,
)


class DataParallel(PlainStateDict):
    """Wrap `module`: check that the ranks agree on it, and give every rank rank 0's parameters and buffers.

    Subclasses average gradients in `_average`. Contract and errors: `impl.data_parallel.DataParallelWrapper`.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(self.process_group)
        self.synchronizing = True  # False inside no_sync
        self.trainable = [p for p in module.parameters() if p.requires_grad]  # a tied parameter comes once
        check_same_module(module, self.process_group)
        broadcast_state(module, self.process_group)
        # parameters whose gradient is this rank's own, in order of arrival
        self._unaveraged: dict[nn.Parameter, None] = {}
        for parameter in self.trainable:
            call_on_gradient(parameter, self._on_gradient)
        check_before_steps(self, _refuse_unaveraged_gradients)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks; inside `no_sync`, do nothing."""
        if self.synchronizing:
            self._unaveraged.clear()
            with torch.no_grad():  # gradients may have a graph
                self._average()

    def _average(self) -> None:
        """Make every gradient the average over the ranks."""
        raise NotImplementedError

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Called when backward has produced the parameter's gradient."""
        self._unaveraged[parameter] = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in this context stay local and accumulate."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before


def gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient; where this rank's loss did not reach the parameter, `.grad` becomes zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def row_major(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy: a collective sends memory as it lies, and ranks may have other strides, or a
    gradient whose conjugation was put off."""
    return tensor.contiguous().resolve_conj() if tensor.layout == torch.strided else tensor


def _refuse_unaveraged_gradients(wrapper: DataParallel, optimizer: Optimizer) -> None:
    """Raise RuntimeError for a gradient that was not averaged: the ranks' parameters would become different.

    A gradient that has been freed since, as `zero_grad()` does, is no error.
    """
    if not wrapper._unaveraged:
        return
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter in wrapper._unaveraged and parameter.grad is not None:
            name = next(name for name, p in wrapper.module.named_parameters() if p is parameter)
            raise RuntimeError(
                f"the gradient of {name!r} is this rank's alone: call finish_gradient_synchronization(), outside "
                "no_sync(), between backward and optimizer.step()"
            )

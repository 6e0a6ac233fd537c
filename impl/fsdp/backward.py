"""Watch backward passes: is one running, did one raise, does an optimizer step before gradients are synchronized?

torch's autograd answers the first two by private names alone; they are used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

BACKWARD_RAISED = "backward raised, so that gradients are incomplete: call zero_grad() and begin the next step"
NOT_SYNCHRONIZED = "optimizer.step() before finish_gradient_synchronization()"


def backward_runs() -> bool:
    """True inside a backward pass of this thread: a forward there is activation checkpointing's recomputation."""
    return torch._C._current_graph_task_id() != -1


class BackwardPasses:
    """Backward passes that began and did not end. If none is running, these raised."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def watch(self) -> None:
        """Call in a backward pass, also in a nested one: autograd calls back at its end, unless it raises."""
        if (task := torch._C._current_graph_task_id()) not in self._open:
            self._open.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._open.discard, task))

    def __bool__(self) -> bool:
        return bool(self._open)

    def forget(self) -> None:
        self._open.clear()


class Synchronizes(Protocol):
    """A wrapper whose gradients are reduced once the step asks for them; `sharded.py` imports this file."""

    _unsynchronized: bool
    """Whether gradients were accumulated on this rank alone, and no backward has reduced them since."""

    def _trainable(self) -> Iterator[nn.Parameter]: ...


def refuse_unsynchronized_gradients(model: Synchronizes, optimizer: Optimizer) -> None:
    """Raise RuntimeError if an optimizer steps on the model's parameters while gradients are not synchronized."""
    if model._unsynchronized:
        own = set(model._trainable())
        if any(p in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(NOT_SYNCHRONIZED)

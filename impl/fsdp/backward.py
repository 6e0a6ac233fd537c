"""Whether backward runs, and whether it came to its end: autograd tells of both, by names that torch keeps private."""

from __future__ import annotations

from functools import partial

import torch


def backward_runs() -> bool:
    """Whether this is within a backward pass: a forward in there is activation checkpointing, which computes again."""
    return torch._C._current_graph_task_id() != -1


class BackwardPasses:
    """Those that have begun and not ended: when none runs, those that raised."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def watch(self) -> None:
        """Called within one, and within one inside of another: autograd calls back at its end, unless it raises."""
        if (task := torch._C._current_graph_task_id()) not in self._open:
            self._open.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._open.discard, task))

    def __bool__(self) -> bool:
        return bool(self._open)

    def forget(self) -> None:
        """What raised is dealt with."""
        self._open.clear()

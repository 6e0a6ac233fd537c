"""How one case is set up and stepped on a rank, as perf and the prediction run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shardmark.api.registry import Implementation

Mark = Callable[[str], None]
"""`mark(part)` ends a part of the step, such as "forward"."""

stage_listeners: list[Mark] = []
"""Callbacks of the running memory meters, called with the name of a stage of making a workload when the stage ends."""


def stage(name: str) -> None:
    """End a stage of making a workload: report it to the memory meter, if one runs."""
    for listener in stage_listeners:
        listener(name)


class Workload(Protocol):
    """One case made ready to run on one rank: `Workload(implementation, case, device)` makes its tensors and modules.

    `backend` names what runs underneath (a process-group backend, an attention kernel). An observer may need further
    methods, such as `kinds()`, and names them (`shardmark.rows.observers`). One that has `calls`, a number, takes that
    many steps back to back in each measurement, whose time is divided by it: for steps of microseconds.
    """

    backend: str

    def __init__(self, implementation: Implementation, case: Any, device: str) -> None: ...

    def prepare(self) -> None:
        """Run before each step, not timed."""
        ...

    def step(self, mark: Mark) -> None:
        """Run the work. `mark(part)` ends a part of it, for the stopwatch and for the memory meter."""
        ...

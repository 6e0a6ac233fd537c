"""A step that is timed beside its two halves, as on a link of limited bandwidth."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from shardmark.api import Implementation, Mark


class BesideHalves:
    """Base before a workload: in the same rounds what a training step computes and what it communicates, each alone.

    Each half is a workload of its own, with a model of its own, which its first step makes when no meter runs.
    """

    computation: ClassVar[type[Any]]
    communication: ClassVar[type[Any]]

    def __init__(self, implementation: Implementation, case: Any, device: str) -> None:
        super().__init__(implementation, case, device)  # type: ignore[call-arg]
        self.alone = implementation, case, device

    @cached_property
    def compute(self) -> Any:
        """The workload that computes."""
        return self.computation(*self.alone)

    @cached_property
    def communicate(self) -> Any:
        """The workload that communicates."""
        return self.communication(*self.alone)

    def compute_step(self, mark: Mark) -> None:
        """Compute alone."""
        self.compute.prepare()
        self.compute.step(mark)

    def communication_step(self, mark: Mark) -> None:
        """Communicate alone."""
        self.communicate.step(mark)

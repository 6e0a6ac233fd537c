"""Record a program's launches once, so that its time at any rates takes only sums.

This is for programs on one device with one stream; there `Schedule` gives the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np

from shardmark.meter.hardware import hardware
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.schedule import Mark, Rates
from studies.published.steps import Timed


class Part(NamedTuple):
    """A part of a step: the range of its operators, and whether it ends by the host's clock or the device's."""

    name: str
    of_host: bool
    begin: int
    end: int


@dataclass
class Trace:
    """`Rates` at which nothing takes time. They record whether each operator is launched in backward, and its cost on
    the device.
    """

    on_host: ClassVar[bool] = False
    in_backward: list[bool] = field(default_factory=list)
    costs: list[Cost | None] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def launch(self, in_backward: bool) -> float:
        self.in_backward.append(in_backward)
        self.costs.append(None)
        return 0.0

    def seconds(self, cost: Cost) -> float:
        self.costs[-1] = cost
        return 0.0

    def least(self, cost: Cost) -> float:
        return 0.0

    def collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        return 0.0

    least_of_collective = collective

    def collective_launch(self) -> float:
        return 0.0

    def beside_collective(self) -> float:
        return 1.0

    def seconds_of_parts(self, takes: np.ndarray, host: tuple[float, float], ahead: float = 0.0) -> dict[str, float]:
        """Seconds of each part. `takes` are the operators' seconds on the device, `host` those of a launch in forward
        and of one in backward. The device begins `ahead` seconds after the host.
        """
        launching = np.where(self.in_backward, host[1], host[0])
        found, before, on_host, free = {}, ahead, 0.0, ahead
        for part in self.parts:
            own = takes[part.begin : part.end]
            launched, done = on_host + np.cumsum(launching[part.begin : part.end]), np.cumsum(own)
            # The part ends when all operators from some one on have run, and that one began when it was launched.
            free = float(done[-1] + max(free, np.max(launched - done + own)))
            on_host = float(launched[-1]) if part.of_host else max(free, float(launched[-1]))
            found[part.name] = on_host - before
            before = on_host
        return found

    def least_of_parts(self, rates: Rates) -> dict[str, float]:
        """Lower bound of each part's seconds."""
        return {
            part.name: sum(rates.least(cost) for cost in self.costs[part.begin : part.end] if cost is not None)
            for part in self.parts
        }


@cache
def trace(program: Timed, on: str) -> Trace:
    """Record what the program's step launches."""
    found = Trace()
    with simulation(on=hardware(on)) as timer:
        step = program(timer)
        timer.rates = found

        def marked(mark: Mark) -> None:
            begin = 0

            def noted(name: str, of_host: bool = False) -> None:
                nonlocal begin
                found.parts.append(Part(name, of_host, begin, len(found.costs)))
                begin = len(found.costs)

            step(noted)

        timer.step(marked)
    return found

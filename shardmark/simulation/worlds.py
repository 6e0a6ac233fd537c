"""What stands in for worlds where cases are predicted: nothing runs on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shardmark.registry import Unsupported

HARDWARE = ("cpu",)
"""What is known well enough to predict for."""
MOST_RANKS = 100_000


def simulated_ranks(value: str) -> int:
    """The ranks of a value of `--simulate`, HARDWARE[:RANKS]; ValueError, in one line, for another value."""
    hardware, colon, ranks = value.partition(":")
    if hardware not in HARDWARE:
        raise ValueError(f"--simulate {value}: no hardware is known as {hardware!r}; known is {', '.join(HARDWARE)}")
    if not colon:
        return 1
    if not (ranks.isascii() and ranks.isdecimal() and len(ranks) < 10 and 1 <= int(ranks) <= MOST_RANKS):
        raise ValueError(f"--simulate {value}: the ranks are a number from 1 to {MOST_RANKS:,}, not {ranks!r}")
    return int(ranks)


class SimulatedWorld:
    """So many ranks that are not there."""

    device = "cpu"
    alive = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.deadline = 0.0

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> NoReturn:
        """Raises Unsupported: what is not `measure`'s own passes is not predicted."""
        raise Unsupported(f"{function.__name__} is for ranks that run, and --simulate predicts memory alone")


class SimulatedWorlds:
    """`shardmark.world.Worlds`' interface: any size, at once."""

    device = "cpu"
    deadline = 0.0

    def get(self, size: int) -> SimulatedWorld:
        return SimulatedWorld(size)

    def close(self) -> None:
        """There is nothing to end."""

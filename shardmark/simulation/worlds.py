"""What stands in for worlds where cases are predicted: nothing runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from shardmark.registry import Unsupported
from shardmark.simulation.hardware import Hardware, hardware

MOST_RANKS = 100_000


def ranks_of(text: str) -> int | None:
    """The number of ranks that it says, from 1 to MOST_RANKS; None where it says none."""
    plain = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if plain and 1 <= int(text) <= MOST_RANKS else None


@dataclass(frozen=True)
class Simulated:
    """The hardware, and how many ranks of it, whose memory is predicted."""

    hardware: Hardware
    ranks: int


def simulated(value: str) -> Simulated:
    """What a value of `--simulate`, HARDWARE[:RANKS], stands for; ValueError, in one line, for another value."""
    name, colon, ranks = value.rpartition(":") if ":" in value else (value, "", "1")
    try:
        known = hardware(name)
    except ValueError as error:
        raise ValueError(f"--simulate {value}: {error}") from None
    if not colon:
        return Simulated(known, 1)
    if (number := ranks_of(ranks)) is None:
        raise ValueError(f"--simulate {value}: the ranks are a number from 1 to {MOST_RANKS:,}, not {ranks!r}")
    return Simulated(known, number)


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

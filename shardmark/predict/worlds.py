"""Stand-ins for worlds where cases are predicted: nothing runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shardmark.api.registry import Unsupported
from shardmark.meter.hardware import THIS, Hardware, hardware
from shardmark.ranks.link import Link
from shardmark.ranks.world import WorldError, check_size
from shardmark.ranks.worlds import Worlds

if TYPE_CHECKING:
    from shardmark.predict.simulation.this_machine import Machine

MOST_RANKS = 100_000


def ranks_of(text: str) -> int | None:
    """The number in the text, from 1 to MOST_RANKS; None for any other text."""
    plain = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if plain and 1 <= int(text) <= MOST_RANKS else None


@dataclass(frozen=True)
class Simulated:
    """The simulated hardware, and its number of ranks."""

    hardware: Hardware
    ranks: int


def simulated(value: str) -> Simulated:
    """Parse a value of `--simulate`, HARDWARE[:RANKS]. ValueError, in one line, for another value."""
    name, colon, ranks = value.rpartition(":") if ":" in value else (value, "", "1")
    try:
        known = hardware(name)
    except ValueError as error:
        raise ValueError(f"--simulate {value}: {error}") from None
    if not colon:
        return Simulated(at_hand(known), 1)
    if (number := ranks_of(ranks)) is None:
        raise ValueError(f"--simulate {value}: the ranks are a number from 1 to {MOST_RANKS:,}, not {ranks!r}")
    if name == THIS and known.device == "cpu":  # they measure
        try:
            check_size(number, known.device)
        except WorldError as error:
            raise ValueError(f"--simulate {value}: {error}") from None
    return Simulated(at_hand(known), number)


def at_hand(known: Hardware) -> Hardware:
    """The hardware; for `this`, where CUDA works, with the measured rates of this machine's GPU."""
    if known.name != THIS or known.device == "cpu":
        return known
    from shardmark.predict.calibration.measuring import this_gpu  # all of PyTorch's FSDP comes with it

    return this_gpu()


class SimulatedWorld:
    """Stands in for a world where no rank is started: everything on its ranks is simulated."""

    device = "cpu"
    alive = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.deadline = 0.0

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> NoReturn:
        """Raises Unsupported: only `measure`'s own passes are predicted."""
        raise Unsupported(f"{function.__name__} is for ranks that run, and --simulate predicts steps alone")


class SimulatedWorlds:
    """`shardmark.ranks.world.Worlds`' interface: any size, at once."""

    device = "cpu"
    deadline = 0.0

    def __init__(self, hardware: Hardware, link: Link | None = None) -> None:
        self._hardware = hardware
        self._link = link
        self._machine: Machine | None = None

    def get(self, size: int) -> SimulatedWorld:
        return SimulatedWorld(size)

    @property
    def machine(self) -> Machine | None:
        """Measures the operators of each case on this machine's CPU, if that is the simulated hardware. A GPU is
        calibrated once."""
        if self._machine is None and self._hardware.name == THIS and self._hardware.device == "cpu":
            from shardmark.predict.simulation.this_machine import Machine  # all of PyTorch's FSDP comes with it

            self._machine = Machine(Worlds(self._hardware.device, self._link))
        return self._machine

    def close(self) -> None:
        """End the measuring ranks, if any."""
        if self._machine is not None:
            self._machine.worlds.close()

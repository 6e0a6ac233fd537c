"""The warm worlds of a session: which tests have used each, and when one is replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from shardmark.ranks import torchrun
from shardmark.ranks.checkout import Checkout
from shardmark.ranks.deadline import within
from shardmark.ranks.left_behind import LeftBehind
from shardmark.ranks.link import Link
from shardmark.ranks.rank import WorldError, WorldLostError
from shardmark.ranks.world import DEADLINE, World
from shardmark.text import printable


class Worlds:
    """The worlds of a session: one of each size, started when first asked for and replaced when it has failed. All are
    on the same link, if any, and of the same version of the code."""

    def __init__(self, device: str, link: Link | None = None, checkout: Checkout | None = None) -> None:
        self.device = device
        self.link = link
        self.checkout = checkout
        self.deadline = DEADLINE
        """Seconds that a call may take on the worlds that `get` returns."""
        self.before: dict[str, None] = {}
        """Ids of tests that have used a world before the present test got it."""
        self._test = ""
        self._worlds: dict[int, World] = {}

    def begin(self, test: str) -> None:
        """The test of that id uses the worlds from now on."""
        self._test, self.before = test, {}

    def get(self, size: int) -> World:
        """A live world of `size` ranks; WorldError when the machine does not allow that many."""
        world = self._worlds.get(size)
        if world is not None and (busy := world.busy()):
            told = f"{busy}, of {next(reversed(world.tests))} or of a test before it; new ranks take their place"
            warnings.warn(printable(told), LeftBehind, stacklevel=2)
            world.close()
        if world is None or not world.alive:
            if world is not None:
                world.close()
            world = self._worlds[size] = World(size, self.device, self.link, self.checkout)
        self.before |= {test: None for test in world.tests if test != self._test}
        world.tests[self._test] = None
        world.deadline = self.deadline
        return world

    def renew(self) -> None:
        """Give up the worlds that the present test has used."""
        for world in self._worlds.values():
            if self._test in world.tests:
                world.close()

    def fresh(self, size: int) -> World:
        """A new world of `size` ranks, which nothing has used; the caller closes it."""
        return World(size, self.device, self.link, self.checkout)

    def close(self) -> None:
        """End every rank of every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


class LocalWorld:
    """A world of one rank in this process, for single-device cases under torchrun."""

    size = 1
    alive = True
    deadline = DEADLINE

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """Call `function(*args)` here."""
        with within(self.deadline if deadline is None else deadline):
            return [function(*args)]

    def close(self) -> None:
        """Nothing to end."""


class TorchrunWorlds:
    """`shardmark.ranks.world.Worlds`' interface: the one world that torchrun started, and a local world of one."""

    def __init__(self, device: str, ending: Callable[[str], object]) -> None:
        self.device = device
        self.deadline = DEADLINE
        self._worlds: dict[int, torchrun.TorchrunWorld | LocalWorld] = {1: LocalWorld()}
        self._worlds[torchrun.world_size()] = torchrun.TorchrunWorld(device, ending)

    def get(self, size: int) -> torchrun.TorchrunWorld | LocalWorld:
        """The world of that size; WorldError for a size that torchrun did not start, or for a world that is lost."""
        if size not in self._worlds:
            raise WorldError(f"torchrun started {torchrun.world_size()} ranks, so there is no world of {size}")
        world = self._worlds[size]
        if isinstance(world, torchrun.TorchrunWorld) and not world.alive:
            raise WorldLostError(world.lost_by)
        world.deadline = self.deadline
        return world

    def close(self) -> None:
        """End the other ranks."""
        for world in self._worlds.values():
            world.close()

"""Random histories on the ranks of a world, where a history may hang too.

hold_on_ranks(world, HISTORIES, Player, implementation, device, examples)
"""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from hypothesis.strategies import SearchStrategy

from correctness.engine.histories import History, Player, Problem, hold, play
from shardmark.ranks.world import RankError, World

UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
"""Groups have their ranks in the order that is given, where this PyTorch can make them so."""
SHRINKING = 60
"""Most histories that are played to find a shorter one that fails."""
SHRINKING_HANGS = 0.5
"""Most seconds that hang while a shorter history is looked for, as a share of a call's deadline."""
SHORT, TIMES = 1.0, 5
"""The deadline then: so many times the longest play that has ended, at least so many seconds."""
NEW_RANKS = 0.5
"""Seconds that new ranks cost, about."""


class Alike(NamedTuple):
    """Values by name, such as checksums, that must be equal on several ranks after `after` events."""

    after: int
    what: str
    ranks: tuple[int, ...]
    values: dict[str, Any]


def play_on_ranks(
    world: World,
    make: Callable[..., Player],
    implementation: Any,
    history: History,
    device: str,
    deadline: float | None = None,
) -> Problem | None:
    """Play on every rank with `make(implementation, history, device)`; return the problem that came first. A RankError
    has `after`, the number of the last event that a rank has begun.

    The entries (event index, what, ranks, values by name) of the players' `alike` lists must have the same bits on all
    ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = world.run(_play_on_rank, make, implementation, history, device, folder, deadline=deadline)
        except RankError as error:
            begun = _begun(folder, world.size)
            error.after = max(begun)  # type: ignore[attr-defined]
            if error.hung:
                error.args = (f"{_where(begun)}; {error}",)
            raise
    problems = [
        Problem(problem.after, f"rank {rank} of {world.size}: {problem.what}")
        for rank, (problem, _) in enumerate(ranks)
        if problem is not None
    ]
    expected: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for rank, (_, alike) in enumerate(ranks):
        for after, what, members, values in alike:
            first, wanted = expected.setdefault((after, what, members), (rank, values))
            for name in wanted.keys() | values.keys():
                if wanted.get(name) != values.get(name):
                    claim = f"rank {rank} of {world.size} has other bits than rank {first} in {what} {name!r}"
                    problems.append(Problem(after, claim))
    return min(problems, key=lambda problem: problem.after, default=None)


def _play_on_rank(
    make: Callable[..., Any], implementation: Any, history: History, device: str, folder: str
) -> tuple[Problem | None, list[Alike]]:
    player, file = make(implementation, history, device), _file(folder, dist.get_rank())
    return play(player, history, lambda event: file.write_text(str(event))), getattr(player, "alike", [])


def _file(folder: str, rank: int) -> Path:
    """Where the rank writes the number of the event that it begins, for the case that it never ends."""
    return Path(folder, f"rank{rank}")


def _begun(folder: str, size: int) -> list[int]:
    """Per rank, the number of the event that it has begun last; 0 if none."""
    files = [_file(folder, rank) for rank in range(size)]
    return [int(file.read_text() or 0) if file.exists() else 0 for file in files]


def _where(begun: list[int]) -> str:
    """As in "hangs: rank 0 in event 3, rank 1 in event 4"."""
    where = [
        f"rank {rank} in event {event}" if event else f"rank {rank} before event 1" for rank, event in enumerate(begun)
    ]
    return "hangs: " + ", ".join(where)


@cache
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of these ranks; every rank of the world must call. It is made once per process and never
    destroyed: DTensor remembers the group of a mesh by its ranks, and a wrapper keeps its own."""
    return dist.new_group([*ranks])


def even_and_odd_ranks() -> tuple[int, dist.ProcessGroup]:
    """Return this rank's side (0 or 1) and its process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [group_of(tuple(range(first, size, 2))) for first in range(min(size, 2))]
    return rank % 2, groups[rank % 2]


def hold_on_ranks(
    world: World,
    histories: SearchStrategy[Any],
    make: Callable[..., Player],
    implementation: Any,
    device: str,
    examples: int,
) -> None:
    """`hold` with `play_on_ranks`. A history that hangs is shortened on new ranks, unless torchrun has started them."""
    __tracebackhide__ = True
    ranks = _Ranks(world)
    try:
        hold(
            histories,
            lambda history: ranks.play(make, implementation, history, device),
            examples,
            SHRINKING,
            ranks.can_go_on,
            bounded=False,
        )
    finally:
        ranks.close()


class _Ranks:
    """The test's world; once it has ended, as it does where ranks hang, new ones of its kind."""

    def __init__(self, world: World) -> None:
        self.world = self.first = world
        self.longest = 0.0
        """Seconds of the longest play that has ended."""
        self.hung: float | None = None
        """Seconds that have hung since the first that did."""

    def play(self, make: Callable[..., Player], implementation: Any, history: History, device: str) -> Problem | None:
        if not self.world.alive:
            self.world = self.first.another()
        deadline = None if self.hung is None else self._short
        begun = time.monotonic()
        try:
            problem = play_on_ranks(self.world, make, implementation, history, device, deadline)
        except RankError as error:
            if error.hung:
                self.hung = 0.0 if self.hung is None else self.hung + self._short + NEW_RANKS
            raise
        self.longest = max(self.longest, time.monotonic() - begun)
        return problem

    @property
    def _short(self) -> float:
        return max(SHORT, TIMES * self.longest)

    def can_go_on(self) -> bool:
        if self.hung is None or not isinstance(self.first, World):
            return self.world.alive
        return self.hung + self._short + NEW_RANKS <= SHRINKING_HANGS * self.first.deadline

    def close(self) -> None:
        if self.world is not self.first:
            self.world.close()

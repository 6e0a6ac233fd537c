"""Random histories of events: Hypothesis draws them, a player plays them, and the shortest that fails is printed.

A family writes three things:

- events: frozen dataclasses whose `str` says in plain words what happens;
- a strategy of histories: anything with `events`, whose `str` says in one line what there is before the first event;
- a player, which plays each event on the implementation and on an oracle, and says what is not as expected.

    hold(HISTORIES, lambda history: play(Player(implementation, history), history), examples)
    hold_on_ranks(world, HISTORIES, Player, implementation, device, examples)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from correctness.engine.examples import FEW_EXAMPLES, LEFT_OUT, Work
from shardmark.api import note_unasked
from shardmark.ranks.world import World

SHRINKING, SHRINKING_ON_RANKS = 200, 60
"""Most histories that are played to find a shorter one that fails: a number, and no time, so that the same file has the
same first failure on a busy machine."""


class History(Protocol):
    @property
    def events(self) -> Sequence[Any]: ...


class Player(Protocol):
    """Plays a history on an implementation and on its oracle.

    `play` plays one event. `problem` returns what is not as expected after it, or "": the claim that does not hold, and
    on a second line what was found beside what was expected. Either may raise AssertionError(problem) instead.
    """

    def play(self, event: Any) -> object: ...

    def problem(self) -> str: ...


@dataclass(frozen=True)
class Problem:
    """Problem found after the first `after` events of a history."""

    after: int
    what: str


class Alike(NamedTuple):
    """Values by name, such as checksums, that must be equal on several ranks after `after` events."""

    after: int
    what: str
    ranks: tuple[int, ...]
    values: dict[str, Any]


def one_in(n: int) -> SearchStrategy[bool]:
    """Draw True with probability 1/n; shrinks to False."""
    return st.integers(1, n).map(lambda number: number == n)


def events_of(draw: DrawFn, most: int, following: Callable[[], Any]) -> list[Any]:
    """Draw up to `most` events by `following()`, which may depend on earlier ones. Hypothesis shortens a history by
    leaving events out."""
    left_out = st.integers(0, 19).map(lambda number: number == 0)
    return [following() for _ in range(most) if not draw(left_out)]


def play(player: Player, history: History) -> Problem | None:
    """Play all events, as another rank may wait for this one in any of them; return the first problem."""
    first = None
    for after, event in enumerate(history.events, 1):
        try:
            player.play(event)
            what = player.problem()
        except AssertionError as error:
            what = str(error)
        except Exception as error:
            if first is not None:
                break  # later problems may be consequences
            error.add_note(report(history, Problem(after, "")))
            raise
        if what and first is None:
            first = Problem(after, what)
    return first


def play_on_ranks(
    world: World, make: Callable[..., Player], implementation: Any, history: History, device: str
) -> Problem | None:
    """Play on every rank with `make(implementation, history, device)`; return the problem that came first.

    The entries (event index, what, ranks, values by name) of the players' `alike` lists must have the same bits on all
    ranks.
    """
    ranks = world.run(_play_on_rank, make, implementation, history, device)
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
    make: Callable[..., Any], implementation: Any, history: History, device: str
) -> tuple[Problem | None, list[Alike]]:
    player = make(implementation, history, device)
    return play(player, history), getattr(player, "alike", [])


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


def report(history: History, problem: Problem) -> str:
    """The claim that does not hold, the numbered events up to there, and what was found beside what was expected."""
    claim, _, found = problem.what.partition("\n")
    start = str(history)
    events = [f"  {number}. {event}" for number, event in enumerate(history.events[: problem.after], 1)]
    return "\n".join(filter(None, [claim, f"  {start}" if start else "", *events, found]))


def hold(
    histories: SearchStrategy[Any],
    plays: Callable[[Any], Problem | None],
    examples: int,
    shrinking: int = SHRINKING,
    can_go_on: Callable[[], bool] = lambda: True,
    bounded: bool = True,
) -> None:
    """Play that many random histories, and the simplest one; raise AssertionError with the shortest that fails.

    `plays(history)` returns the history's first problem or raises. The run's --seed draws the same histories again.
    Where few are asked for and they call very many functions, fewer are played if `bounded`. A failure is shortened by
    so many plays, and as long as `can_go_on()`.
    """
    __tracebackhide__ = True
    work = Work(bounded and examples <= FEW_EXAMPLES)
    search = _Search(plays, shrinking, can_go_on)
    for number in range(examples + 1):
        with work.of_one_example():
            search.try_one(histories, number)
        if search.failure is not None:
            raise search.failure from None
        if work.is_enough() and number < examples:
            note_unasked(LEFT_OUT)
            return


def hold_on_ranks(
    world: World,
    histories: SearchStrategy[Any],
    make: Callable[..., Player],
    implementation: Any,
    device: str,
    examples: int,
) -> None:
    """`hold` with `play_on_ranks`; a failure is shortened until the world has ended, as it does where ranks hang."""
    __tracebackhide__ = True
    plays = partial(play_on_ranks, world, make, implementation, device=device)
    hold(histories, plays, examples, SHRINKING_ON_RANKS, lambda: world.alive, bounded=False)


class _Search:
    """Plays drawn histories and remembers those that failed: one that fails by chance is not replayed."""

    def __init__(self, plays: Callable[[Any], Problem | None], shrinking: int, can_go_on: Callable[[], bool]) -> None:
        self.plays, self.left, self.can_go_on = plays, shrinking, can_go_on
        self.failures: dict[str, BaseException] = {}
        self.failure: BaseException | None = None
        """Problem of the shortest history that fails."""

    def try_one(self, histories: SearchStrategy[Any], number: int) -> None:
        """Play the simplest history first, then a freshly drawn one each time: Hypothesis' own next examples would
        be variations."""
        self.to_skip = min(number, 1)  # Hypothesis begins with the simplest each time

        @seed(hash((torch.initial_seed(), number)))
        @settings(
            max_examples=1 + self.to_skip,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(histories)
        def example(history: Any) -> None:
            self._example(history)

        try:
            example()
        except (_Fails, _Enough):
            pass
        except Exception:
            if self.failure is None:  # or the failure came from a search that ended early
                raise

    def _example(self, history: Any) -> None:
        key = repr(history)
        if not self.failures and self.to_skip:
            self.to_skip -= 1
            return
        if key not in self.failures:
            if self.failures:
                if self.left <= 0 or not self.can_go_on():
                    raise _Enough
                self.left -= 1
            try:
                problem = self.plays(history)
            except Exception as error:
                self.failures[key] = error
            else:
                if problem is not None:
                    self.failures[key] = AssertionError(report(history, problem))
        if key in self.failures:
            self.failure = self.failures[key]
            raise _Fails  # one type raised at one place, so that Hypothesis takes all failures for one


class _Fails(Exception):
    """The drawn history fails."""


class _Enough(BaseException):
    """Ends the search for a shorter history; Hypothesis lets it pass."""

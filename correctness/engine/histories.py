"""Random histories of events: Hypothesis draws them, a player plays them, and the shortest that fails is printed.

A family writes three things:

- events: frozen dataclasses whose `str` says in plain words what happens;
- a strategy of histories: anything with `events`, whose `str` says in one line what there is before the first event;
- a player, which plays each event on the implementation and on an oracle, and says what is not as expected.

    hold(HISTORIES, lambda history: play(Player(implementation, history), history), examples)

On ranks it is `hold_on_ranks` of `correctness.engine.histories_on_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from correctness.engine.examples import FEW_EXAMPLES, LEFT_OUT, Work
from shardmark.api import forget_last_call, last_call, note_events, note_unasked
from shardmark.ranks.deadline import Hung

SHRINKING = 200
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


def one_in(n: int) -> SearchStrategy[bool]:
    """Draw True with probability 1/n; shrinks to False."""
    return st.integers(1, n).map(lambda number: number == n)


def events_of(draw: DrawFn, most: int, following: Callable[[], Any]) -> list[Any]:
    """Draw up to `most` events by `following()`, which may depend on earlier ones. Hypothesis shortens a history by
    leaving events out."""
    left_out = st.integers(0, 19).map(lambda number: number == 0)
    return [following() for _ in range(most) if not draw(left_out)]


def play(player: Player, history: History, begins: Callable[[int], object] = lambda event: None) -> Problem | None:
    """Play all events, as another rank may wait for this one in any of them; return the first problem. Call
    `begins(1)` before the first event, and so on."""
    first = None
    for after, event in enumerate(history.events, 1):
        begins(after)
        try:
            player.play(event)
            what = player.problem()
        except AssertionError as error:
            what = str(error)
        except Exception as error:
            if first is not None:
                break  # later problems may be consequences
            error.add_note(report(history, Problem(after, "")))
            error.after = after  # type: ignore[attr-defined]
            raise
        except Hung as error:
            error.after = after  # type: ignore[attr-defined]
            raise
        if what and first is None:
            first = Problem(after, what)
    return first


def report(history: History, problem: Problem) -> str:
    """The claim that does not hold, the numbered events up to there, and what was found beside what was expected."""
    claim, _, found = problem.what.partition("\n")
    return "\n".join(filter(None, [claim, *(f"  {line}" for line in told(history, problem.after)), found]))


def told(history: History, after: int) -> list[str]:
    """The history's own line, and its first `after` events, numbered."""
    events = [f"{number}. {event}" for number, event in enumerate(history.events[:after], 1)]
    return [*filter(None, [str(history)]), *events]


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
    work = Work(bounded and 1 < examples <= FEW_EXAMPLES)  # counting slows what it counts
    search = _Search(plays, shrinking, can_go_on)
    for number in range(examples + 1):
        with work.of_one_example():
            search.try_one(histories, number)
        if search.failure is not None:
            note_events(search.events, search.call)
            raise search.failure from None
        if work.is_enough() and number < examples:
            note_unasked(LEFT_OUT)
            return


class _Search:
    """Plays drawn histories and remembers those that failed: one that fails by chance is not replayed."""

    def __init__(self, plays: Callable[[Any], Problem | None], shrinking: int, can_go_on: Callable[[], bool]) -> None:
        self.plays, self.left, self.can_go_on = plays, shrinking, can_go_on
        self.failures: dict[str, tuple[BaseException, list[str], Any]] = {}
        self.failure: BaseException | None = None
        """Problem of the shortest history that fails."""
        self.events: list[str] = []
        """That history, a line an event, up to where it fails."""
        self.call: Any = None
        """The last call that the history in `events` made."""

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
            forget_last_call()
            try:
                problem = self.plays(history)
            except Exception as error:
                after = getattr(error, "after", len(history.events))
                self.failures[key] = error, told(history, after), last_call()
            except Hung as error:  # here, and not on ranks: the test's deadline has passed, so it is not shortened
                note_events(told(history, getattr(error, "after", 0)), last_call())
                raise
            else:
                if problem is not None:
                    error = AssertionError(report(history, problem))
                    self.failures[key] = error, told(history, problem.after), last_call()
        if key in self.failures:
            self.failure, self.events, self.call = self.failures[key]
            raise _Fails  # one type raised at one place, so that Hypothesis takes all failures for one


class _Fails(Exception):
    """The drawn history fails."""


class _Enough(BaseException):
    """Ends the search for a shorter history; Hypothesis lets it pass."""

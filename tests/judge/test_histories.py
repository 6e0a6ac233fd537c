"""A random history that hangs is told event by event, up to the one that does not end."""

import re
import time
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from correctness.engine import histories_on_ranks
from correctness.engine.histories import Problem, events_of, hold, play
from shardmark.api.refusals import ledger, watched
from shardmark.ranks.deadline import Hung, within
from shardmark.ranks.world import RankError, World

EVENTS = ("step", "evaluate", "save", "load")


@dataclass(frozen=True)
class History:
    events: list[str]

    def __str__(self) -> str:
        return "a model"


@st.composite
def histories(draw: DrawFn) -> History:
    return History(events_of(draw, 5, lambda: draw(st.sampled_from(EVENTS))))


class Player:
    """Never returns from a load after a save."""

    def __init__(self) -> None:
        self.saved = False

    def play(self, event: str) -> None:
        self.saved |= event == "save"
        while self.saved and event == "load":
            time.sleep(0.05)

    def problem(self) -> str:
        return ""


def test_in_one_process_its_events_are_told() -> None:
    hold(histories(), lambda history: None, 1)  # as Hypothesis begins slowly
    with ledger() as notes, pytest.raises(Hung), within(2):
        hold(histories(), lambda history: play(Player(), history), 50)
    first, *events = notes.events
    assert first == "a model" and events[-1].endswith(". load") and any(event.endswith(". save") for event in events)


def test_the_call_that_is_told_is_of_the_shortest_history_that_fails() -> None:
    """A shorter history that was tried later, and did not fail, has made the last call."""

    class Contract:
        def __call__(self, number: int) -> None: ...

    call = watched(lambda number: None, Contract, ())

    def plays(history: History) -> Problem | None:
        for event in history.events:
            call(EVENTS.index(event))
        return Problem(len(history.events), "it fails") if history.events[-1:] == ["load"] else None

    with ledger() as notes, pytest.raises(AssertionError, match="it fails"):
        hold(histories(), plays, 50)
    assert notes.events == ["a model", "1. load"] and notes.last and notes.last[1].arguments == (("number", 3),)


def test_on_ranks_it_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(world: World, make: object, implementation: object, history: History, *_: object) -> None:
        """As ranks of such players, without the seconds that they hang."""
        if re.search("save.*load", " ".join(history.events)):
            error = RankError("hangs", rank=0, hung=True)
            error.after = len(history.events)  # type: ignore[attr-defined]
            raise error

    monkeypatch.setattr(histories_on_ranks, "play_on_ranks", played)
    with World(1) as world, ledger() as notes:
        world.deadline = 600.0
        with pytest.raises(RankError):
            histories_on_ranks.hold_on_ranks(world, histories(), Player, None, "cpu", 50)
    assert notes.events == ["a model", "1. save", "2. load"]

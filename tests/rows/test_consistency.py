"""A run whose figures contradict each other is seen, whichever figure is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf.conftest import rows_meet_their_schema
from shardmark.plugin.session import SESSION
from shardmark.rows.columns import Entry
from shardmark.rows.consistency import contradictions
from shardmark.rows.reader import entries_of, read_run
from tests.support.entries import entry

RECORD = Path(__file__).parents[2] / "studies" / "records" / "two-cores-cpu.json.gz"


def pair() -> list[Entry]:
    """Two rows that were timed beside each other: 0.5 and 1 s."""
    limit = {"seconds": 0.1, "fraction": 0.2}
    judged = {"peer_median": 1.0, "judged_interval": [0.3, 0.7], "budget": 1.0, "goal": 1.0, "outcome": "reached"}
    reverse = {"peer_median": 0.5, "judged_interval": None}
    return [
        entry(
            "fused", 0.5, ("eager", 0.4, 0.5, 0.6), time=judged, limit=limit, work={"flops": 5, "flops_per_second": 10}
        ),
        entry("eager", 1.0, ("fused", 1 / 0.6, 2.0, 1 / 0.4), time=reverse),
    ]


PLANTED: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "the peer's time": lambda mine, theirs: theirs["stats"].update(median=1.1, q3=1.2),
    "its own time": lambda mine, theirs: mine["stats"].update(median=0.45, q1=0.4),
    "the ratio": lambda mine, theirs: mine["extra_info"]["time"].update(ratio=0.55),
    "the reverse ratio": lambda mine, theirs: theirs["extra_info"]["time"].update(ratio=1.9),
    "the interval": lambda mine, theirs: mine["extra_info"]["time"].update(interval=[0.51, 0.6]),
    "the quartiles": lambda mine, theirs: mine["stats"].update(q1=0.51),
    "the goal": lambda mine, theirs: mine["extra_info"]["time"].update(outcome="missed"),
    "the verdict": lambda mine, theirs: mine["extra_info"]["time"].update(judged_interval=[0.3, 1.2]),
    "the rate": lambda mine, theirs: mine["extra_info"]["work"].update(flops_per_second=11),
    "the fraction": lambda mine, theirs: mine["extra_info"]["limit"].update(fraction=0.25),
    "the peer in the row": lambda mine, theirs: mine["extra_info"]["time"].update(peer_median=1.05),
}


def test_figures_that_agree_are_no_contradiction() -> None:
    assert list(contradictions(pair())) == []


@pytest.mark.parametrize("wrong", PLANTED)
def test_each_contradiction_is_seen(wrong: str) -> None:
    entries = pair()
    PLANTED[wrong](*entries)
    assert any("[" in line and ": " in line for line in contradictions(entries))


def test_an_earlier_row_of_the_same_place_is_held_to_the_figures_as_well() -> None:
    """As where two tests of a question measure the same case."""
    wrong, right = pair(), pair()
    wrong[0]["stats"].update(median=0.45, q1=0.4)
    assert list(contradictions([*wrong, *right]))
    assert list(contradictions([*right, *pair()])) == []


def test_a_contradiction_fails_the_test_that_made_it_and_no_later_one() -> None:
    wrong = pair()
    PLANTED["its own time"](*wrong)
    rows = SimpleNamespace(rows=wrong)
    config = SimpleNamespace(stash={SESSION: SimpleNamespace(scale="smoke", rows=rows)})
    assert list(contradictions(rows.rows))
    checked = rows_meet_their_schema._get_wrapped_function()  # type: ignore[attr-defined]
    assert list(checked(config)) == [None]


def test_the_recorded_run_does_not_contradict_itself() -> None:
    assert list(contradictions(entries_of(read_run(RECORD)))) == []

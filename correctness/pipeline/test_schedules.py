"""Schedules as data: complete, without deadlock, as long and as large as stated; and plans that are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from impl.pipeline import Facts, gpipe, is_schedule, one_forward_one_backward, planned
from impl.pipeline.actions import Action, Kind, parsed, plan_of
from impl.pipeline.checking import checked, in_flight
from impl.pipeline.timing import UNITS, bubble, drawn, timeline
from shardmark.api import Implementation, NotAsked, Unsupported

RANKS = (1, 2, 3, 4, 6, 8)


@pytest.mark.family("pipeline")
@pytest.mark.parametrize("ranks", RANKS)
def test_a_schedule_is_complete_and_ends(implementation: Implementation, ranks: int) -> None:
    """For one micro-batch up to four for each rank, with sends that wait for their receipts."""
    if not is_schedule(implementation.target):
        raise NotAsked("it is a runner, and no schedule")
    for count in range(1, 4 * ranks + 1):
        try:
            plan = planned(implementation.target, ranks, count, implementation.facts)
        except Unsupported:
            continue
        assert {action.micro_batch for action in plan[0]} == set(range(count))


@pytest.mark.family("pipeline")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("of_each", [1, 2, 4])
def test_the_bubble_is_that_of_the_formula(implementation: Implementation, ranks: int, of_each: int) -> None:
    """Where F, I and W take equal times, and messages none."""
    facts = implementation.facts
    if not isinstance(facts, Facts) or facts.bubble is None:
        raise NotAsked("it states no bubble")
    try:
        plan = planned(implementation.target, ranks, of_each * ranks)
    except Unsupported as error:
        raise NotAsked(str(error)) from error
    stated = facts.bubble(ranks, of_each * ranks)
    assert stated is not None
    assert bubble(timeline(plan)) == pytest.approx(stated, abs=1e-12)


WRONG: dict[str, tuple[list[list[str]], str]] = {
    "no_such_action": ([["0F0", "0X0"]], "'0X0' is no action"),
    "no_forward": ([["0F0", "0B0", "0B1"]], "rank 0 has no 0F1"),
    "no_backward": ([["0F0", "0B0", "0F1"]], "rank 0 has no backward pass after 0F1"),
    "no_weights": ([["0F0", "0I0", "0F1", "0B1"]], "rank 0 has 0I0 after 0F0: it is 0B0, or 0I0 and 0W0"),
    "both_kinds": ([["0F0", "0I0", "0W0", "0B0", "0F1", "0B1"]], "rank 0 has 0B0 and 0I0 and 0W0 after 0F0"),
    "twice": ([["0F0", "0B0", "0F1", "0B1", "0B1"]], "rank 0 has 0B1 2 times"),
    "one_too_many": ([["0F0", "0B0", "0F1", "0B1", "0F2"]], "rank 0 has 0F2, of 2 micro-batches"),
    "backward_first": ([["0B0", "0F0", "0F1", "0B1"]], "rank 0 has 0B0 before 0F0"),
    "weights_first": ([["0F0", "0W0", "0I0", "0F1", "0B1"]], "rank 0 has 0W0 before 0I0"),
    "on_two_ranks": ([["0F0", "0B0", "0F1", "0B1"], ["0F0", "0B0"]], "stage 0 is on rank 0 and on rank 1"),
    "no_actions": ([["0F0", "0B0", "0F1", "0B1"], []], "rank 1 has no actions"),
    "no_such_stage": ([["0F0", "0B0", "0F1", "0B1"], ["2F0", "2B0", "2F1", "2B1"]], "no rank has stage 1, of 3 stages"),
    "waits_for_itself": (
        [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
        "rank 0 waits for ever at 0B0: it needs 1B0",
    ),
    "both_send_first": (
        [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        ],
        "it never ends where a send waits for its receipt: rank 0 at 0SEND_F1, rank 1 at 1SEND_B0",
    ),
    "in_another_order": (
        [
            ["0F0", "0F1", "0SEND_F1", "0SEND_F0", "0RECV_B0", "0RECV_B1", "0B0", "0B1"],
            ["1RECV_F0", "1RECV_F1", "1F0", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
        ],
        "it never ends where a send waits for its receipt: rank 0 at 0SEND_F1, rank 1 at 1RECV_F0",
    ),
    "never_received": (
        [["0F0", "0SEND_F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "rank 0 has 0SEND_F0, which no rank receives as 1RECV_F0",
    ),
    "received_late": (
        [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1F0", "1RECV_F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        ],
        "rank 1 has 1F0 before 1RECV_F0",
    ),
    "sent_early": (
        [
            ["0SEND_F0", "0F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
        ],
        "rank 0 has 0SEND_F0 before 0F0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_in_one_line(name: str) -> None:
    texts, says = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        checked(plan_of(texts), 2)
    assert "\n" not in str(raised.value)


def test_a_plan_that_holds_more_than_stated_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 0 holds 3 forward passes at once, and 2 are stated"):
        planned(gpipe, 2, 3, Facts(in_flight=lambda ranks, count: [2, 2]))


def test_a_plan_may_have_its_own_messages() -> None:
    own = planned(one_forward_one_backward, 3, 5)
    assert checked(plan_of([[str(action) for action in rank] for rank in own]), 5) == own


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_are_those_between_ranks(ranks: int) -> None:
    """One in each direction for each micro-batch and pair of stages on different ranks."""
    kinds = [action.kind for rank in planned(one_forward_one_backward, ranks, 3) for action in rank]
    for kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD):
        assert kinds.count(kind) == 3 * (ranks - 1)


def test_actions_are_written_as_they_are_read() -> None:
    for kind in Kind:
        action = Action(12, kind, 34)
        assert parsed(str(action)) == action


def test_times_of_a_small_plan() -> None:
    """Two ranks and two micro-batches of 1F1B, by hand."""
    found = timeline(planned(one_forward_one_backward, 2, 2))
    first = [(str(each.action), each.begin, each.end) for each in found[0]]
    assert first == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert [each.begin for each in found[1]] == [1, 2, 4, 5]
    assert bubble(found) == pytest.approx(1 - 12 / 18)


def test_a_plan_is_drawn() -> None:
    found = drawn(timeline(planned(one_forward_one_backward, 2, 2)))
    assert found.splitlines() == [
        "rank 0  0F0 0F1 .   .   0B0     .   0B1",
        "rank 1  .   1F0 1B0     1F1 1B1     .   .",
    ]


PICTURES = Path(__file__).parents[2] / "docs" / "pipeline.md"


@pytest.mark.family("pipeline")
def test_the_page_draws_the_schedule(implementation: Implementation) -> None:
    if implementation.spec != implementation.name or not is_schedule(implementation.target):
        raise NotAsked("the page draws the suite's own schedules")
    lines = drawn(timeline(planned(implementation.target, 2, 4))).splitlines()
    assert "\n".join(f"    {line}" for line in lines) in PICTURES.read_text()


def test_held_forward_passes_of_cut_backward_passes_end_with_the_weights() -> None:
    actions = plan_of([["0F0", "0I0", "0F1", "0W0", "0B1"]])[0]
    assert in_flight(actions) == 2
    assert UNITS[Kind.BACKWARD] == UNITS[Kind.INPUT] + UNITS[Kind.WEIGHT]

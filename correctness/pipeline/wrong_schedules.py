"""Defects of pipelines' schedules: actions that are missing, repeated or late, and plans that never end."""

from __future__ import annotations

from correctness.support.planting import defect
from impl.pipeline import gpipe, interleaved, one_forward_one_backward, planned, zero_bubble
from impl.pipeline.actions import Action, Kind
from impl.pipeline.messages import receipt_for, send_of

Lists = list[list[Action]]


@defect(cause="shapes", caught_by="test_any_number_of_micro_batches[starts_too_many")
def starts_too_many(ranks: int, micro_batches: int) -> Lists:
    """Each rank begins with as many forward passes as there are stages from its own on, also where there are fewer
    micro-batches."""
    found = one_forward_one_backward(ranks, micro_batches)
    for rank, actions in enumerate(found):
        extra = range(micro_batches, ranks - rank)
        actions[:0] = [Action(rank, Kind.FORWARD, number) for number in extra]
    return found


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[forgets_the_last_backward-pp2-plain")
def forgets_the_last_backward(ranks: int, micro_batches: int) -> Lists:
    """The cooldown ends one backward pass early on all ranks but the last."""
    return [actions[:-1] if rank < ranks - 1 else actions for rank, actions in enumerate(gpipe(ranks, micro_batches))]


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[forgets_weights-pp2-plain")
def forgets_weights(ranks: int, micro_batches: int) -> Lists:
    """Weights' gradients that are still to be found at the end of a step are dropped."""
    found = []
    for rank, actions in enumerate(zero_bubble(ranks, micro_batches)):
        late = {Action(rank, Kind.WEIGHT, number) for number in range(micro_batches - rank, micro_batches)}
        found.append([action for action in actions if action not in late])
    return found


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[finds_weights_twice-pp2-plain")
def finds_weights_twice(ranks: int, micro_batches: int) -> Lists:
    """The last micro-batch's gradients of weights are found twice."""
    return [
        [*actions, Action(rank, Kind.WEIGHT, micro_batches - 1)]
        for rank, actions in enumerate(zero_bubble(ranks, micro_batches))
    ]


@defect(cause="communication", caught_by="test_a_schedule_is_complete_and_ends[finds_weights_first")
def finds_weights_first(ranks: int, micro_batches: int) -> Lists:
    """A weight's gradient comes before that of the input, whose backward pass finds what it takes."""
    found = zero_bubble(ranks, micro_batches)
    for actions in found:
        first = next(index for index, action in enumerate(actions) if action.kind == Kind.WEIGHT)
        before = actions.index(actions[first].as_kind(Kind.INPUT))
        actions.insert(before, actions.pop(first))
    return found


@defect(cause="communication", caught_by="test_a_schedule_is_complete_and_ends[begins_backward_early")
def begins_backward_early(ranks: int, micro_batches: int) -> Lists:
    """Interleaved stages with the warm-up of one stage a rank: a backward pass is awaited before what it needs."""
    found = []
    for rank, actions in enumerate(interleaved(ranks, micro_batches)):
        forwards = [action for action in actions if action.kind == Kind.FORWARD]
        backwards = [action for action in actions if action.kind == Kind.BACKWARD]
        before = ranks - rank - 1
        pairs = [each for pair in zip(forwards[before:], backwards, strict=False) for each in pair]
        found.append([*forwards[:before], *pairs, *backwards[len(forwards) - before :]])
    return found


@defect(cause="world size", caught_by="test_a_schedule_is_complete_and_ends[sends_before_it_receives-2")
def sends_before_it_receives(ranks: int, micro_batches: int) -> Lists:
    """1F1B that receives before each pass and sends behind it: two neighbours send to one another at once, which is
    right only while sends wait for nobody."""
    found: Lists = []
    for rank, actions in enumerate(one_forward_one_backward(ranks, micro_batches)):
        found.append([])
        for action in actions:
            forward = action.kind == Kind.FORWARD
            is_from, is_to = (rank > 0, rank < ranks - 1) if forward else (rank < ranks - 1, rank > 0)
            found[-1] += [receipt_for(action)] * is_from + [action] + [send_of(action)] * is_to
    return found


@defect(cause="world size", caught_by="test_a_schedule_is_complete_and_ends[receives_in_another_order")
def receives_in_another_order(ranks: int, micro_batches: int) -> Lists:
    """The last rank is sent the first two micro-batches in one order and receives them in the other."""
    found = planned(gpipe, ranks, micro_batches)
    receives = [i for i, action in enumerate(found[-1]) if action.kind == Kind.RECEIVE_FORWARD]
    if len(receives) > 1:
        first, second = receives[:2]
        found[-1].insert(first, found[-1].pop(second))
        found[-1].insert(first + 1, found[-1].pop(first + 1))
    return found


@defect(cause="communication", caught_by="test_steps_are_those_of_one_process[leaves_out_a_message-pp2-plain")
def leaves_out_a_message(ranks: int, micro_batches: int) -> Lists:
    """Messages are written by hand, and the last gradient is never sent."""
    found = planned(one_forward_one_backward, ranks, micro_batches)
    last = Action(ranks - 1, Kind.SEND_BACKWARD, micro_batches - 1)
    return [[action for action in actions if action != last] for actions in found]


@defect(cause="world size", caught_by="test_a_schedule_is_complete_and_ends[is_for_two_ranks")
def is_for_two_ranks(ranks: int, micro_batches: int) -> Lists:
    """It returns a plan for two ranks, whatever their number is."""
    return one_forward_one_backward(2, micro_batches)

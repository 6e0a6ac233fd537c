"""Proof that a plan is complete, ends, and holds as many micro-batches as stated, before any rank starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from impl.pipeline.actions import COMPUTES, NEEDS, SENDS, Action, Kind, Plan, ranks_of_stages
from impl.pipeline.messages import done_as, needed_by, receipt_for, receipt_of, send_of, with_messages


def checked(plan: Plan, micro_batches: int, most_in_flight: Sequence[int] | None = None) -> Plan:
    """The plan with messages, put in where it has none, if it is right: each stage on one rank passes each micro-batch
    forward and backward once, in an order in which each action has what it needs; it ends also where each send
    waits for its receipt; and each rank holds no more than that many forward passes. ValueError, in one line, says what
    is wrong."""
    stages = len(ranks_of_stages(plan))
    for rank, actions in enumerate(plan):
        _check_complete(rank, actions, micro_batches)
    if not any(action.kind not in COMPUTES for actions in plan for action in actions):
        plan = with_messages(plan)
    _check_messages(plan)
    _check_end(plan, stages)
    for rank, most in enumerate(most_in_flight or ()):
        if (held := in_flight(plan[rank])) > most:
            raise ValueError(f"rank {rank} holds {held} forward passes at once, and {most} are stated")
    return plan


def _check_complete(rank: int, actions: Sequence[Action], micro_batches: int) -> None:
    """Each stage of the rank has each micro-batch once, forward before backward, input before weight gradients."""
    place = {action: index for index, action in enumerate(actions)}
    for action, count in Counter(actions).items():
        if count > 1:
            raise ValueError(f"rank {rank} has {action} {count} times")
        if action.micro_batch >= micro_batches:
            raise ValueError(f"rank {rank} has {action}, of {micro_batches} micro-batches")
    for stage in sorted({action.stage for action in actions}):
        for micro_batch in range(micro_batches):
            forward, whole, own, weight = (Action(stage, kind, micro_batch) for kind in COMPUTES)
            parts = [each for each in (whole, own, weight) if each in place]
            if forward not in place:
                raise ValueError(f"rank {rank} has no {forward}")
            if parts not in ([whole], [own, weight]):
                has = " and ".join(map(str, parts)) or "no backward pass"
                raise ValueError(f"rank {rank} has {has} after {forward}: it is {whole}, or {own} and {weight}")
            order = [forward, *parts]
            for before, after in pairwise(order):
                if place[before] > place[after]:
                    raise ValueError(f"rank {rank} has {after} before {before}")


def _check_messages(plan: Plan) -> None:
    """Each message that is needed is sent once, behind what it sends, and received before it is used."""
    rank_of = ranks_of_stages(plan)
    place = {action: (rank, index) for rank, actions in enumerate(plan) for index, action in enumerate(actions)}
    for action, (rank, index) in place.items():
        if action.kind in SENDS and receipt_of(action) not in place:
            raise ValueError(f"rank {rank} has {action}, which no rank receives as {receipt_of(action)}")
        if action.kind not in NEEDS:
            continue
        forward = action.kind == Kind.FORWARD
        source = action.stage - 1 if forward else action.stage + 1
        if source not in rank_of or rank_of[source] == rank:
            continue
        receipt, send = receipt_for(action), send_of(Action(source, action.kind, action.micro_batch))
        for each, where in ((receipt, rank), (send, rank_of[source])):
            if each not in place:
                raise ValueError(f"rank {where} has no {each}, which {action} needs")
        if place[receipt][1] > index:
            raise ValueError(f"rank {rank} has {action} before {receipt}")
        found = [send.as_kind(kind) for kind in ((Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT))]
        if not any(each in place and place[each] < place[send] for each in found):
            raise ValueError(f"rank {place[send][0]} has {send} before {found[0]}")


def _check_end(plan: Plan, stages: int) -> None:
    """Go through the plan with sends that wait until the other rank is at their receipt."""
    left = [list(reversed(actions)) for actions in plan]
    done: set[Action] = set()

    def may_go(action: Action) -> bool:
        """Whether another stage has given what the action needs, on the same rank or by a message."""
        needed = needed_by(action, stages)
        return needed is None or needed in done or receipt_for(action) in done

    while any(left):
        moved = False
        for actions in left:
            if not actions:
                continue
            action = actions[-1]
            if action.kind in COMPUTES and may_go(action):
                done.add(done_as(actions.pop()))
                moved = True
            elif action.kind in SENDS:
                receipt = receipt_of(action)
                other = next((each for each in left if each and each[-1] == receipt), None)
                if other is not None:
                    done |= {actions.pop(), other.pop()}
                    moved = True
        if not moved:
            at = ", ".join(f"rank {rank} at {actions[-1]}" for rank, actions in enumerate(left) if actions)
            raise ValueError(f"it never ends where a send waits for its receipt: {at}")


def in_flight(actions: Sequence[Action]) -> int:
    """The most forward passes whose tensors a rank holds at once: until their backward passes, or where these are cut
    in two, until the weights' gradients are found."""
    held = most = 0
    for action in actions:
        held += (action.kind == Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
        most = max(most, held)
    return most

"""Messages between stages on different ranks, put into a plan that has none."""

from __future__ import annotations

from impl.pipeline.actions import COMPUTES, GIVES_BACK, Action, Kind, Plan, ranks_of_stages

RECEIVED_AS = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}


def receipt_of(send: Action) -> Action:
    """The action of the other rank that receives what this one sends."""
    stage = send.stage + (1 if send.kind == Kind.SEND_FORWARD else -1)
    return Action(stage, RECEIVED_AS[send.kind], send.micro_batch)


def send_of(action: Action) -> Action:
    """The send of what a pass has found: the output, or the gradient of the input."""
    return action.as_kind(Kind.SEND_FORWARD if action.kind == Kind.FORWARD else Kind.SEND_BACKWARD)


def receipt_for(action: Action) -> Action:
    """The receipt of what a pass needs of a neighbour: its input, or the gradient of its output."""
    return action.as_kind(Kind.RECEIVE_FORWARD if action.kind == Kind.FORWARD else Kind.RECEIVE_BACKWARD)


def message_after(action: Action, rank_of: dict[int, int]) -> Action | None:
    """The send of what an action has found, if a stage of another rank needs it."""
    to = action.stage + 1 if action.kind == Kind.FORWARD else action.stage - 1
    if action.kind == Kind.WEIGHT or action.kind not in COMPUTES or to not in rank_of:
        return None
    if rank_of[to] == rank_of[action.stage]:
        return None
    return send_of(action)


def needed_by(action: Action, stages: int) -> Action | None:
    """The action of a neighbour whose result this one needs; None where it needs none, or its own stage's alone."""
    if action.kind == Kind.FORWARD and action.stage > 0:
        return Action(action.stage - 1, Kind.FORWARD, action.micro_batch)
    if action.kind in GIVES_BACK and action.stage < stages - 1:
        return Action(action.stage + 1, Kind.BACKWARD, action.micro_batch)
    return None


def done_as(action: Action) -> Action:
    """The action by which others know it: the gradient of an input is one, whichever kind of action finds it."""
    return action.as_kind(Kind.BACKWARD) if action.kind in GIVES_BACK else action


def with_messages(plan: Plan) -> Plan:
    """The plan with sends and receives. Actions are gone through in an order in which each has what it needs; a message
    is put behind what both ranks have done by then, so that all pairs of ranks meet in one order, and a send that
    waits for its receipt waits for nobody who waits for it. ValueError, in one line, where no such order exists.
    """
    rank_of = ranks_of_stages(plan)
    stages = len(rank_of)
    waiting = [list(reversed(actions)) for actions in plan]
    found: Plan = [[] for _ in plan]
    done: set[Action] = set()
    while any(waiting):
        moved = False
        for rank, left in enumerate(waiting):
            if not left or ((need := needed_by(left[-1], stages)) is not None and need not in done):
                continue
            action, moved = left.pop(), True
            found[rank].append(action)
            done.add(done_as(action))
            if (send := message_after(action, rank_of)) is not None:
                found[rank].append(send)
                receipt = receipt_of(send)
                found[rank_of[receipt.stage]].append(receipt)
        if not moved:
            rank, action = next((rank, left[-1]) for rank, left in enumerate(waiting) if left)
            raise ValueError(f"rank {rank} waits for ever at {action}: it needs {needed_by(action, stages)}")
    return found

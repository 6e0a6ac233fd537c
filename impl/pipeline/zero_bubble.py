"""Zero-bubble schedules: the gradients of weights, which nobody waits for, fill the gaps (Qi et al., "Zero Bubble
Pipeline Parallelism", 2023; Qi et al., "Pipeline Parallelism with Controllable Memory", 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from impl.pipeline.actions import Action, Kind
from impl.pipeline.contract import Facts, register_schedule
from impl.pipeline.messages import done_as, needed_by


def zero_bubble(ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZB-H1: 1F1B whose backward passes are cut in two. Rank r finds gradients of weights r micro-batches late, so that
    all ranks hold as many forward passes as 1F1B's first one, and the last ranks have work left at the end."""
    found = []
    for rank in range(ranks):
        forwards, inputs, weights = (
            [Action(rank, kind, n) for n in range(micro_batches)] for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        )
        before = min(ranks - rank, micro_batches)
        own = forwards[:before]
        for number, action in enumerate(inputs):
            own += [action, *weights[number - rank : number - rank + 1]] if number >= rank else [action]
            own += forwards[number + before : number + before + 1]
        found.append(own + weights[max(micro_batches - rank, 0) :])
    return found


def zero_bubble_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZBV: two stages of a rank, placed there and back, so that the first rank has the first stage and the last. Each
    holds two passes, of half the layers, for each rank. The order is the one that ranks find which, in each unit of
    time, take the first of these that can run: the gradient of an input, of the earlier stage first; a forward pass, of
    the later stage first; the gradients of weights."""
    stages_of = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    left = [_queues(*own, micro_batches) for own in stages_of]
    found: list[list[Action]] = [[] for _ in stages_of]
    done: set[Action] = set()
    while any(any(queues.values()) for queues in left):
        now = [_next(queues, found[rank], done, ranks) for rank, queues in enumerate(left)]
        for rank, action in enumerate(now):
            if action is not None:
                left[rank][action.stage, action.kind].pop(0)
                found[rank].append(action)
        done |= {done_as(action) for action in now if action is not None}
    return found


EXACT = (1, 2, 3, 4, 8)
"""Numbers of ranks for which the order of `zero_bubble_v` leaves no gap but that at the beginning; others have more."""

Queues = dict[tuple[int, Kind], list[Action]]


def _queues(there: int, back: int, micro_batches: int) -> Queues:
    """Actions by stage and kind, in the order in which they are tried."""
    order = [(there, Kind.INPUT), (back, Kind.INPUT), (back, Kind.FORWARD), (there, Kind.FORWARD)]
    order += [(there, Kind.WEIGHT), (back, Kind.WEIGHT)]
    return {(stage, kind): [Action(stage, kind, n) for n in range(micro_batches)] for stage, kind in order}


def _next(queues: Queues, before: Sequence[Action], done: set[Action], ranks: int) -> Action | None:
    """The action that the rank takes now, after those before."""
    kinds, own = [action.kind for action in before], set(before)
    is_full = kinds.count(Kind.FORWARD) - kinds.count(Kind.WEIGHT) == 2 * ranks
    for (_, kind), waiting in queues.items():
        if not waiting or (kind == Kind.FORWARD and is_full):
            continue
        needed = needed_by(waiting[0], 2 * ranks)
        earlier = {Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}.get(kind)
        if (needed is None or needed in done) and (earlier is None or waiting[0].as_kind(earlier) in own):
            return waiting[0]
    return None


register_schedule(
    "zero_bubble",
    zero_bubble,
    Facts(
        bubble=lambda ranks, m: (ranks - 1) / (3 * m + ranks - 1) if m >= ranks else None,
        in_flight=lambda ranks, m: [min(ranks, m)] * ranks,
    ),
    beside="torch_interleaved_zero_bubble",
    called="zero bubble H1",
)
register_schedule(
    "zero_bubble_v",
    zero_bubble_v,
    Facts(
        bubble=lambda ranks, m: (ranks - 1) / (6 * m + ranks - 1) if m >= ranks and ranks in EXACT else None,
        in_flight=lambda ranks, m: [min(2 * ranks, 2 * m)] * ranks,
    ),
    beside="torch_zero_bubble_v",
    called="zero bubble V",
)

"""Schedules in which each rank alternates between forward and backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from impl.pipeline.actions import Action, Kind
from impl.pipeline.contract import Facts, register_schedule


def alternating(forwards: Sequence[Action], backwards: Sequence[Action], before: int) -> list[Action]:
    """So many forward passes before the first backward pass, one of each in turn, and the rest."""
    found, left = [*forwards[:before]], list(reversed(forwards[before:]))
    for backward in backwards:
        if left:
            found.append(left.pop())
        found.append(backward)
    return found


def gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    """All forward passes, then all backward passes (Huang et al., "GPipe", 2019)."""
    numbers = range(micro_batches)
    return [
        [Action(rank, kind, number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in numbers]
        for rank in range(ranks)
    ]


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B: each rank runs a backward pass as soon as it can, and so holds as many forward passes as there are stages
    from its own on (Narayanan et al., "PipeDream", 2019; Fan et al., "DAPPLE", 2021)."""
    found = []
    for rank in range(ranks):
        forwards, backwards = (
            [Action(rank, kind, n) for n in range(micro_batches)] for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        found.append(alternating(forwards, backwards, before=ranks - rank - 1))
    return found


STAGES_OF_A_RANK = 2


def interleaved(ranks: int, micro_batches: int, stages: int = STAGES_OF_A_RANK) -> list[list[Action]]:
    """1F1B with several stages of each rank, one in each round through all ranks: the bubble is that much shorter, and
    more is sent (Narayanan et al., "Efficient Large-Scale Language Model Training", 2021). Micro-batches go through in
    groups of as many as ranks. Where the last group is smaller, the schedule is that of a whole one without those that
    are missing."""
    found = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        own = [rank + turn * ranks for turn in range(stages)]
        forwards = [Action(stage, Kind.FORWARD, n) for group in groups for stage in own for n in group]
        backwards = [Action(stage, Kind.BACKWARD, n) for group in groups for stage in reversed(own) for n in group]
        # The first backward pass of the last rank needs its last stage's first forward pass; others begin earlier.
        order = alternating(forwards, backwards, before=(stages - 1) * ranks + 2 * (ranks - rank - 1))
        found.append([action for action in order if action.micro_batch < micro_batches])
    return found


def bubble_of_alternating(ranks: int, micro_batches: int, stages: int = 1) -> float:
    """Share of a step for which a rank waits, where a backward pass takes as long as two forward passes or any other
    time: p - 1 of a stage's passes beside the m v that a rank has."""
    return (ranks - 1) / (stages * micro_batches + ranks - 1)


register_schedule(
    "gpipe",
    gpipe,
    Facts(bubble=bubble_of_alternating, in_flight=lambda ranks, m: [m] * ranks),
    beside="torch_gpipe",
    called="GPipe",
)
register_schedule(
    "one_forward_one_backward",
    one_forward_one_backward,
    Facts(bubble=bubble_of_alternating, in_flight=lambda ranks, m: [min(m, ranks - rank) for rank in range(ranks)]),
    beside="torch_1f1b",
    called="1F1B",
)
register_schedule(
    "interleaved",
    interleaved,
    Facts(
        bubble=lambda ranks, m: None if m % ranks else bubble_of_alternating(ranks, m, STAGES_OF_A_RANK),
        in_flight=lambda ranks, m: [
            min(STAGES_OF_A_RANK * m, (STAGES_OF_A_RANK - 1) * ranks + 2 * (ranks - rank - 1) + 1)
            for rank in range(ranks)
        ],
    ),
    beside="torch_interleaved",
    tested_briefly=True,  # the runner is the same, and the plan is proven for any ranks
    called="interleaved 1F1B",
)

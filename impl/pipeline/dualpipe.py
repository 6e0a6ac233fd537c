"""DualPipeV, DualPipe cut in half: stages there and back, of which one passes forward while the other passes backward
(DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024; Qi et al., "DualPipe could be better without the Dual", 2025)."""

from __future__ import annotations

from impl.pipeline.actions import Action, Kind
from impl.pipeline.contract import Facts, register_schedule
from shardmark.api import Unsupported


class _Rank:
    """The actions of a rank with the stages `there` and `back`, as they are added."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.counts: dict[tuple[int, Kind], int] = {}
        self.actions: list[Action] = []
        self.weights: list[Action] = []
        """Gradients of weights that are still to be found, the oldest first."""

    def add(self, half: int, kind: Kind, cuts: bool = False) -> None:
        """A pass of that half, 0 there and 1 back; with `cuts` a backward pass without the gradients of weights."""
        number = self.counts.get((half, kind), 0)
        self.counts[half, kind] = number + 1
        action = Action(self.stages[half], Kind.INPUT if cuts else kind, number)
        self.actions.append(action)
        if cuts:
            self.weights.append(action.as_kind(Kind.WEIGHT))

    def both(self, forward: int, backward: int) -> None:
        """Passes that may overlap: on one device they share its time."""
        self.add(forward, Kind.FORWARD)
        self.add(backward, Kind.BACKWARD)

    def find_weights(self) -> None:
        if self.weights:
            self.actions.append(self.weights.pop(0))


def dualpipe_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """See the reports for a picture of its eight parts."""
    if micro_batches < 2 * ranks:
        raise Unsupported(f"DualPipeV takes {2 * ranks} micro-batches or more on {ranks} ranks, not {micro_batches}")
    return [_of_rank(rank, ranks, micro_batches) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    own, after = _Rank(rank, ranks), ranks - rank - 1
    for _ in range(2 * after):
        own.add(0, Kind.FORWARD)
    for _ in range(rank + 1):
        own.add(0, Kind.FORWARD)
        own.add(1, Kind.FORWARD)
    for _ in range(after):
        own.add(1, Kind.BACKWARD, cuts=True)
        own.find_weights()
        own.add(1, Kind.FORWARD)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        own.both(0, 1)
        own.both(1, 0)
    for _ in range(after):
        own.add(1, Kind.BACKWARD)
        own.both(1, 0)
    cuts = False
    for turn in range(rank + 1):  # the second half of these is cut
        middle = turn == (rank + 1) // 2
        cuts = cuts or (middle and rank % 2 == 1)
        own.add(1, Kind.BACKWARD, cuts)
        cuts = cuts or (middle and rank % 2 == 0)
        own.add(0, Kind.BACKWARD, cuts)
    for _ in range(after):
        own.find_weights()
        own.add(0, Kind.BACKWARD, cuts=True)
    while own.weights:
        own.find_weights()
    return own.actions


register_schedule(
    "dualpipe_v",
    dualpipe_v,
    Facts(
        bubble=lambda ranks, m: (ranks - 1) / (6 * m + ranks - 1),
        in_flight=lambda ranks, m: [2 * ranks + 1] * ranks,
    ),
    beside="torch_dualpipe_v",
    tested_briefly=True,  # as `interleaved`
    called="DualPipeV",
)

"""Actions of a pipeline's ranks, in the notation of torch.distributed.pipelining.

"0F1"       stage 0: forward pass of micro-batch 1
"0B1"       its backward pass
"0I1"       the part of it that finds the gradient of the stage's input
"0W1"       the rest: gradients of weights
"0SEND_F1"  send what the forward pass returned to the next stage;  "1RECV_F1" receive it there
"1SEND_B1"  send the gradient of the input to the stage before;     "0RECV_B1" receive it there
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
NEEDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
"""Kinds that need what another stage has found."""
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
GIVES_BACK = (Kind.BACKWARD, Kind.INPUT)
"""Kinds that find the gradient of the stage's input."""


@dataclass(frozen=True)
class Action:
    """One action of a rank."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    def as_kind(self, kind: Kind) -> Action:
        """The action of that kind, of the same stage and micro-batch."""
        return Action(self.stage, kind, self.micro_batch)


Plan = list[list[Action]]
"""The actions of each rank, in their order."""

_NOTATION = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)")


def parsed(text: str) -> Action:
    """An action from its notation; ValueError, in one line, for another text."""
    match = _NOTATION.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is no action: it is written as 0F1, for stage 0, forward, micro-batch 1")
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def plan_of(texts: Sequence[Iterable[str | Action]]) -> Plan:
    """A plan from the notation of each rank's actions."""
    return [[each if isinstance(each, Action) else parsed(each) for each in rank] for rank in texts]


def ranks_of_stages(plan: Plan) -> dict[int, int]:
    """The rank that has each stage. ValueError where two ranks have one stage, where a rank has no
    actions, or where a stage is missing."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(plan):
        if not actions:
            raise ValueError(f"rank {rank} has no actions")
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} is on rank {found[action.stage]} and on rank {rank}")
    if missing := [stage for stage in range(max(found) + 1) if stage not in found]:
        raise ValueError(f"no rank has stage {missing[0]}, of {max(found) + 1} stages")
    return dict(sorted(found.items()))

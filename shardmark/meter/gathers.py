"""When each all-gather of a step starts, when the program wants it, and how long it waits for it.

for gather in gathers_of(workload.step):
    print(gather.nbytes, gather.in_time, gather.over - gather.wanted)
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardmark.meter.communication import Communication, listening

REST = "rest"
_OPERATIONS: Any = torch._C._distributed_c10d.OpType  # type: ignore[attr-defined]
_ALL_GATHERS = {int(getattr(_OPERATIONS, name)) for name in ("ALLGATHER", "_ALLGATHER_BASE", "ALLGATHER_COALESCED")}


@dataclass
class Gather:
    """One all-gather, in seconds of this process's clock."""

    nbytes: int
    started: float
    part: str = REST
    """Part of the step in which it is wanted."""
    wanted: float = 0.0
    over: float = 0.0
    """The wait for it is over."""
    in_time: bool = False
    """Whether it had ended when it was wanted."""


def gathers_of(step: Any) -> list[Gather]:
    """The all-gathers of `step(mark)`, which must wait for them in the order in which it starts them.

    On a CPU rank alone: a GPU's host waits for none. RuntimeError where not every one is waited for by its handle.
    """
    found: list[Gather] = []
    awaited = 0
    ended: list[Gather] = []
    wait = dist.Work.wait

    def starts(each: Communication, starting: bool) -> None:
        if starting and each.name == "all_gather":
            found.append(Gather(each.nbytes, perf_counter()))

    def timed(work: Any, *args: Any) -> bool:
        nonlocal awaited
        if int(work._get_op_type()) not in _ALL_GATHERS or awaited == len(found):
            return wait(work, *args)
        gather = found[awaited]
        awaited += 1
        gather.in_time, gather.wanted = work.is_completed(), perf_counter()
        result = wait(work, *args)
        gather.over = perf_counter()
        ended.append(gather)
        return result

    def mark(part: str) -> None:
        for gather in ended:
            gather.part = part
        ended.clear()

    with listening(starts), patch.object(dist.Work, "wait", timed):
        step(mark)
    if awaited != len(found):
        raise RuntimeError(f"of {len(found)} all-gathers {awaited} are waited for by their handles")
    return found

"""All-gathers of a step on CPU ranks: when they start, when they are wanted, and how long a rank waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.meter.gathers import Gather, gathers_of
from shardmark.plugin import WorldsBySize

DELAY = 0.5


def gather(out: Tensor) -> dist.Work:
    return dist.all_gather_into_tensor(out, torch.ones(1), async_op=True)


def in_time_and_late() -> list[Gather]:
    """One all-gather that has ended when it is wanted, and one that the last rank starts late."""

    def step(mark: Callable[[str], None]) -> None:
        early = gather(torch.zeros(2))
        dist.all_reduce(torch.ones(1))  # whose wait is not counted
        while not early.is_completed():
            time.sleep(0.001)
        early.wait()
        mark("forward")
        if dist.get_rank() == 1:
            time.sleep(DELAY)
        gather(torch.zeros(2)).wait()

    dist.barrier()
    return gathers_of(step)


def test_a_rank_waits_for_an_all_gather_that_another_starts_late(worlds: WorldsBySize) -> None:
    early, late = worlds(2).run(in_time_and_late)[0]
    assert (early.part, early.in_time, early.nbytes) == ("forward", True, 8)
    assert (late.part, late.in_time, late.nbytes) == ("rest", False, 8)
    assert early.started < early.wanted <= early.over <= late.started <= late.wanted
    assert late.over - late.wanted > DELAY / 2 > early.over - early.wanted


def never_waited_for() -> str:
    with pytest.raises(RuntimeError) as raised:
        gathers_of(lambda mark: kept.append(gather(torch.zeros(2))))
    kept.pop().wait()
    return str(raised.value)


kept: list[dist.Work] = []


def test_an_all_gather_that_is_not_waited_for_is_one_line(worlds: WorldsBySize) -> None:
    assert worlds(2).run(never_waited_for)[0] == "of 1 all-gathers 0 are waited for by their handles"

"""A step of a pipeline whose stages sleep in place of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.pipeline.accounting import WIDTH
from impl.pipeline.actions import Action, Kind
from impl.pipeline.cases import SleepingCase
from impl.pipeline.contract import is_schedule, planned
from impl.pipeline.runner import Runner
from impl.pipeline.timing import UNITS
from shardmark.api import Implementation, Mark, Unsupported


class Sleeping(Runner):
    """A runner whose passes also sleep, `seconds` for each unit of time."""

    def __init__(self, seconds: float, *args: Any) -> None:
        super().__init__(*args)
        seconds /= len(self.modules)
        for kind, does in self._does.items():
            if kind in UNITS:
                self._does[kind] = partial(_slowly, does, UNITS[kind] * seconds)


def _slowly(does: Callable[[Action], None], seconds: float, action: Action) -> None:
    """The pass, which waits for what it needs and does next to nothing, and the time that it stands for."""
    does(action)
    time.sleep(seconds)


def _build(device: str, stage: int, stages: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False, device=device)


def _loss(output: Tensor, target: Any) -> Tensor:
    return output.sum()


class SleepingStep:
    """A step of the schedule; a runner of one's own cannot be made to sleep."""

    def __init__(self, implementation: Implementation, case: SleepingCase, device: str) -> None:
        if not is_schedule(implementation.target):
            raise Unsupported("it is a runner, whose stages do not sleep")
        self.backend = dist.get_backend()
        plan = planned(implementation.target, case.ranks, case.micro_batches)
        group = dist.group.WORLD
        assert group is not None
        self.pipeline = Sleeping(case.unit_ms / 1e3, plan, partial(_build, device), group, _loss)
        self.inputs: Sequence[tuple[Tensor, ...]] = [(torch.ones(1, WIDTH, device=device),)] * case.micro_batches

    def prepare(self) -> None:
        """Nothing to reset: gradients accumulate."""

    def step(self, mark: Mark) -> None:
        """Forward and backward passes of all micro-batches."""
        self.pipeline.step(self.inputs, [None] * len(self.inputs))
        mark("forward and backward")


def computing_seconds(case: SleepingCase) -> float:
    """Seconds for which each rank computes."""
    return case.micro_batches * case.unit_ms / 1e3 * (UNITS[Kind.FORWARD] + UNITS[Kind.BACKWARD])

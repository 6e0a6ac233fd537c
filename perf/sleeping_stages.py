"""A step of a pipeline whose stages sleep in place of computing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.pipeline.accounting import WIDTH
from impl.pipeline.actions import Action, Kind, ranks_of_stages
from impl.pipeline.cases import SleepingCase
from impl.pipeline.contract import is_schedule, planned
from impl.pipeline.runner import Does, Runner
from impl.pipeline.timing import UNITS, timeline
from impl.pipeline.workload import Look, named, watching
from shardmark.api import Implementation, Mark, Unsupported


def _slowly(unit: float, does: Does, action: Action) -> None:
    """The action, which does next to nothing, and the time that it stands for."""
    does(action)
    if action.kind in UNITS:
        time.sleep(UNITS[action.kind] * unit)


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
        self.plan, self.unit = plan, case.unit_ms / 1e3
        self.pipeline = Runner(plan, partial(_build, device), group, _loss, lambda shapes: [(shapes[0], torch.float32)])
        self.pipeline.around = partial(_slowly, self.unit / len(self.pipeline.modules))
        self.inputs: Sequence[tuple[Tensor, ...]] = [(torch.ones(1, WIDTH, device=device),)] * case.micro_batches

    def prepare(self) -> None:
        """Nothing to reset: gradients accumulate."""

    def step(self, mark: Mark) -> None:
        """Forward and backward passes of all micro-batches."""
        self.pipeline.step(self.inputs, [None] * len(self.inputs))
        mark("forward and backward")

    def watched(self, look: Look) -> None:
        """A step, each pass of which `look` carries out."""
        with watching(self.pipeline, look):
            self.step(lambda part: None)

    def expected(self) -> list[list[tuple[str, str, float, float]]]:
        """By the plan, where messages take no time: each rank's passes, as `watched` names them, from when to when; of
        schedules whose ranks have as many stages each."""
        stages = Counter(ranks_of_stages(self.plan).values())
        if len(set(stages.values())) > 1:
            return []
        unit = self.unit / stages[0]
        return [
            [(*named(each.action), each.begin * unit, each.end * unit) for each in rank] for rank in timeline(self.plan)
        ]


def computing_seconds(case: SleepingCase) -> float:
    """Seconds for which each rank computes."""
    return case.micro_batches * case.unit_ms / 1e3 * (UNITS[Kind.FORWARD] + UNITS[Kind.BACKWARD])

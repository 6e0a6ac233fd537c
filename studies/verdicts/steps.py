"""Two steps, of which one does a known share more of the same work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardmark.api.registry import Family, Implementation, add_family, register
from shardmark.api.workload import Mark
from shardmark.meter.measure_case import timed_rounds, timed_step, warmed_up
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Measured, Plan

REPETITIONS = {0: (30, 30), 3: (33, 34), 5: (20, 21), 10: (20, 22)}
"""By slowdown in percent: repetitions of the work by the peer, and by the slower one."""

BUCKETS = 4


@dataclass(frozen=True)
class Steps:
    """A peer's step, and a step that is `slower` percent longer; `width` is that of the layer."""

    slower: int
    width: int

    def __str__(self) -> str:
        return f"width{self.width}-slower{self.slower}"


class Repetitions(Protocol):
    """Returns how often a case's work is repeated."""

    def __call__(self, case: Steps) -> int: ...


def _is_callable(target: Any, device: str) -> None: ...


add_family(Family("repetitions", Repetitions, reference="peer", check=_is_callable))
PEER = register("repetitions", "peer", lambda case: REPETITIONS[case.slower][0])
SLOWER = register("repetitions", "slower", lambda case: REPETITIONS[case.slower][1])


class Repeated:
    """Repeat forward and backward of a layer; then all-reduce as many layers' gradients, in buckets."""

    backend = "gloo"

    def __init__(self, implementation: Implementation, case: Steps, device: str) -> None:
        self.repetitions = implementation.target(case)
        self.layer = torch.nn.Linear(case.width, case.width, bias=False, device=device)
        self.inputs = torch.randn(case.width, case.width, device=device)
        self.gradients = torch.zeros(self.repetitions * case.width**2, device=device)

    def prepare(self) -> None:
        """Drop the gradient, so that it does not add up beyond float32."""
        self.layer.weight.grad = None

    def step(self, mark: Mark) -> None:
        """Repeat as often as the implementation says, then all-reduce each bucket of gradients."""
        for _ in range(self.repetitions):
            self.layer(self.inputs).sum().backward()
        if dist.get_world_size() > 1:
            for bucket in self.gradients.chunk(BUCKETS):
                dist.all_reduce(bucket)


def judged_rounds(plan: Plan) -> Measured:
    """The timed rounds of the plan on this rank, as `measure` runs them."""
    return timed_rounds(plan, Memory(), plan.workload(plan.implementation, plan.case, plan.device))


def times_in_a_row(plan: Plan, seconds: float) -> list[float]:
    """The slowest rank's seconds of one step after another, for about `seconds`."""
    workload, taken = warmed_up(plan, 3), list[float]()
    while sum(taken) < seconds:
        slowest = torch.tensor(timed_step(plan, workload, workload.step).seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return taken

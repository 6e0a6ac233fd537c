"""What does an optimizer step cost, in time and in memory, and what does clipping gradients add to it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from impl.accounting.optim import shapes, work
from impl.model import SIZES
from shardmark import cases, registry
from shardmark.cases import Grid, OptimizerCase
from shardmark.measure import Measure
from shardmark.plan import Mark
from shardmark.registry import Implementation, Race, Unsupported
from shardmark.rows import Row

pytestmark = pytest.mark.family("optimizer")

MAX_NORM = 1.0


class OptimizerStep:
    """A step over the parameters of a language model, each with a random gradient, that clipping has to scale."""

    def __init__(self, implementation: Implementation, case: OptimizerCase, device: str) -> None:
        options: dict[str, Any] = {}
        if case.master_weights:
            if not implementation.accepts("master_weights"):
                raise Unsupported(f"{implementation} takes no master_weights")
            options["master_weights"] = True
        in_step = case.clipping == "in_step" and implementation.accepts("max_grad_norm")
        if in_step:
            options["max_grad_norm"] = MAX_NORM
        dtype = getattr(torch, case.dtype)
        self.parameters = []
        for shape in shapes(SIZES[case.model]):
            p = torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02).requires_grad_()
            p.grad = torch.empty_like(p, requires_grad=False).normal_()
            self.parameters.append(p)
        self.optimizer = implementation.adapted(self.parameters, **options)
        self.clips_before = case.clipping != "none" and not in_step
        self.backend = "clip_grad_norm_" if self.clips_before else "in step" if in_step else "no clipping"

    def prepare(self) -> None:
        """Nothing: a step reads the gradients that are there."""

    def step(self, mark: Mark) -> None:
        """Clip, where the optimizer does not, and step."""
        if self.clips_before:
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        mark("optimizer")


def _measure(
    measure: Measure,
    implementation: Implementation,
    case: OptimizerCase,
    time: Race | None = None,
    goals: Mapping[str, float] | None = None,
) -> Row:
    amount = work(case)
    return measure(
        OptimizerStep,
        implementation,
        case,
        work=amount,
        rates=lambda seconds: {"bytes_per_second": amount.bytes_moved / seconds},
        time=time,
        goals=goals,
    )


@pytest.mark.question("What does an optimizer step cost?")
@pytest.mark.cases(cases.OPTIMIZER_STEP)
def test_step(implementation: Implementation, case: OptimizerCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question("What does clipping gradients add to a step?")
@pytest.mark.cases(cases.CLIPPED_STEP)
def test_clipping(implementation: Implementation, case: OptimizerCase, measure: Measure) -> None:
    if case.clipping == "in_step" and not implementation.accepts("max_grad_norm"):
        pytest.skip(f"{implementation} takes no max_grad_norm")
    _measure(measure, implementation, case)


@dataclass(frozen=True)
class Goal:
    """`implementation` takes at most `ratio` times what `peer` takes, and reaches `limit` of the copy bandwidth.

    No peer with master weights: torch has no such option, and what is put together in its place is easily beaten.
    """

    implementation: str
    peer: str | None
    ratio: float
    limit: float | None
    case: OptimizerCase

    def __str__(self) -> str:
        return "-".join(filter(None, (self.implementation, self.peer, str(self.case))))


GOALS = Grid(
    smoke=[],
    laptop=[],
    paper=[
        *(
            Goal("fused_triton", None if case.master_weights else "torch_fused", 1.0, 0.85, case)
            for case in cases.OPTIMIZER_STEP.paper
        ),
        # The peer has no clipping of its own: it steps after `clip_grad_norm_`.
        *(
            Goal("fused_triton", "torch_fused", 1.0, None, case)
            for case in cases.CLIPPED_STEP.paper
            if case.clipping == "in_step"
        ),
    ],
)


@pytest.mark.question("Does the fused optimizer reach its goals?")
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("optimizer", case.implementation)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    race = Race(case.peer, goal=case.ratio) if case.peer else None
    goals = {"fraction": case.limit} if case.limit is not None else None
    row = _measure(measure, implementation, case.case, race, goals)
    if case.peer and row["time"]["ratio"] is None:
        pytest.skip(f"not judged: {case.peer} does not run here, or there is no room for both")

"""What does an optimizer step cost, in time and in memory, and what does clipping gradients add to it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from impl.optim.accounting import work
from impl.optim.cases import CLIPPING, OptimizerCase
from impl.optim.workload import OptimizerStep
from shardmark.api import Grid, Implementation, Race, registry
from shardmark.plugin.measure import Measure
from shardmark.report.answers import goals
from shardmark.rows.observers import Goals, Observer
from shardmark.rows.row import Row


def _each_dtype(*models: str) -> list[OptimizerCase]:
    return [
        case
        for model in models
        for case in (OptimizerCase(model), OptimizerCase(model, dtype="bfloat16", master_weights=True))
    ]


OPTIMIZER_STEP = Grid(
    smoke=_each_dtype("tiny"),
    laptop=_each_dtype("mini"),
    paper=_each_dtype("2.7b"),
    full=_each_dtype("medium", "xl", "2.7b"),
)

CLIPPED_STEP = Grid(
    smoke=[OptimizerCase("tiny", clipping=clipping) for clipping in CLIPPING],
    laptop=[OptimizerCase("mini", clipping=clipping) for clipping in CLIPPING],
    paper=[OptimizerCase("xl", clipping=clipping) for clipping in CLIPPING],
    full=[OptimizerCase(model, clipping=clipping) for model in ("medium", "xl") for clipping in CLIPPING],
)


pytestmark = pytest.mark.family("optimizer")

COLUMNS = ["case", "implementation", "time ms", "GB/s", "ratio to peer", "tensors MiB", "verdict"]


def _measure(
    measure: Measure,
    implementation: Implementation,
    case: OptimizerCase,
    time: Race | None = None,
    observe: Sequence[Observer] = (),
) -> Row:
    amount = work(case)
    return measure(
        OptimizerStep,
        implementation,
        case,
        work=amount,
        rates=lambda seconds: {"bytes_per_second": amount.bytes_moved / seconds},
        time=time,
        observe=observe,
    )


@pytest.mark.question("What does an optimizer step cost?", short="optimizer step", columns=COLUMNS)
@pytest.mark.cases(OPTIMIZER_STEP)
def test_step(implementation: Implementation, case: OptimizerCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question("What does clipping gradients add to a step?", short="clipping gradients", columns=COLUMNS)
@pytest.mark.cases(CLIPPED_STEP)
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
            for case in OPTIMIZER_STEP.at("full")
        ),
        # The peer has no clipping of its own: it steps after `clip_grad_norm_`.
        *(
            Goal("fused_triton", "torch_fused", 1.0, None, case)
            for case in CLIPPED_STEP.at("full")
            if case.clipping == "in_step"
        ),
    ],
)


@pytest.mark.question(
    "Does the fused optimizer reach its goals?",
    short="optimizer's goals",
    columns=["case", "implementation", "time ms", "GB/s", "ratio to peer", "goal", "verdict"],
    answer=goals,
)
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("optimizer", case.implementation)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    race = Race(case.peer, goal=case.ratio) if case.peer else None
    observe = [Goals(fraction=case.limit)] if case.limit is not None else []
    row = _measure(measure, implementation, case.case, race, observe)
    if case.peer and row["time"]["ratio"] is None:
        pytest.skip(f"not judged: {case.peer} does not run here")

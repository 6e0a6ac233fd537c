"""What does each rung of the ladder change, from nothing to everything compiled, in time and in memory?"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from impl.fsdp.ladder_workload import MLP_LADDER
from impl.training_step.accounting import work
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from perf.published import published
from shardmark.api import Grid, Implementation, registry
from shardmark.plugin.measure import Measure
from shardmark.report.plots import Points
from shardmark.rows.observers import Compile

OPTIONS = (
    "compile_no_options",
    "compile_epilogue_fusion",
    "compile_shape_padding",
    "compile_max_autotune",
    "compile_cudagraphs",
    "compile_all_options",
)


@dataclass(frozen=True)
class Rung:
    """An implementation of the training step, on a case."""

    implementation: str
    case: TrainingStepCase

    def __str__(self) -> str:
        return f"{self.implementation}-{self.case}"


NAMES = ("compile_model", "compile_forward_backward", "compile_step", "checkpointed")


def _rungs(case: TrainingStepCase) -> list[Rung]:
    return [Rung(name, case) for name in (*NAMES, *(OPTIONS if case.dtype == "bfloat16" else ()))]


MLP_RUNGS = Grid(
    smoke=[],
    laptop=[Rung(name, MLP_LADDER.laptop[0]) for name in ("compile_model", "compile_step", "checkpointed")],
    paper=[Rung(name, MLP_LADDER.paper[-1]) for name in NAMES],
    full=[rung for case in MLP_LADDER.at("full") for rung in _rungs(case)],
)
"""The rungs above that of `MLP_LADDER`, which is eager."""


pytestmark = pytest.mark.question(
    "What does each rung of the ladder change?",
    short="ladder",
    columns=["case", "implementation", "time ms", "compile s", "ratio to peer", "tensors MiB", "verdict"],
    plots=[
        Points(
            "The rungs, ours and as published",
            ours={"step time": "stats.median", "peak memory": "memory.peak"},
            units={"step time": "s", "peak memory": "B"},
            published=(
                *published("simple_pytorch", "MLP ladder, vocab", "data_parallel", among=False),
                *published("simple_pytorch", "compile options"),
            ),
        )
    ],
)


def _measure(measure: Measure, implementation: Implementation, case: TrainingStepCase) -> None:
    measure(
        LanguageModelStep,
        implementation,
        case,
        work=work(case),
        rates=lambda seconds: {"tokens_per_second": case.tokens / seconds},
        observe=[Compile()],
    )


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.cases(MLP_LADDER)
def test_first_rungs(implementation: Implementation, case: TrainingStepCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.cases(MLP_RUNGS)
def test_rungs_above(case: Rung, device: str, measure: Measure) -> None:
    implementation = registry.resolve("training_step", case.implementation)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    _measure(measure, implementation, case.case)

"""The MLP ladder's cases: a residual MLP language model, rung by rung from nothing to everything compiled."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase

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


def _cases(model: str, batch: int, context: int) -> list[TrainingStepCase]:
    return [TrainingStepCase(model, batch, context, dtype) for dtype in ("float32", "bfloat16")]


MLP_LADDER = Grid(
    smoke=_cases("mlp-tiny", 2, 32)[:1],
    laptop=_cases("mlp-mini", 4, 128),
    paper=[case for model, context in (("mlp-1024", 1024), ("mlp-4096", 4096)) for case in _cases(model, 8, context)],
)
"""Eager: in float32 the rung without anything, in bfloat16 the one with autocast alone."""

MLP_RUNGS = Grid(
    smoke=[],
    laptop=[Rung(name, MLP_LADDER.laptop[0]) for name in ("compile_model", "compile_step", "checkpointed")],
    paper=[
        Rung(name, case)
        for case in MLP_LADDER.paper
        for name in (
            *("compile_model", "compile_forward_backward", "compile_step", "checkpointed"),
            *(OPTIONS if case.dtype == "bfloat16" else ()),
        )
    ],
)
"""The rungs above those."""

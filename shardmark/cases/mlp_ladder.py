"""The MLP ladder's cases: a residual MLP language model, rung by rung from nothing to everything compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class RankRung(TrainingStepCase):
    """A rung of the ladder on that many ranks, parameters spread; `step` names an implementation of the training step.

    `dtype` is what parameters are gathered and products made in, `reduce_dtype` what gradients are summed in. `meta`
    says whether the model is made on the meta device, so that no rank ever holds the whole of it.
    """

    reduce_dtype: str = "float32"
    step: str = "eager"
    checkpointed: bool = False
    meta: bool = True
    ranks: int = 2

    def __str__(self) -> str:
        step = "" if self.step == "eager" else f"{self.step}-"
        options = "-checkpointed" * self.checkpointed + "-no_meta" * (not self.meta)
        return f"{step}{self.model}-b{self.batch}-s{self.context}-{self.dtype}-reduce_{self.reduce_dtype}{options}"


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

RANK_STEPS = ("eager", "compile_model", "compile_forward_backward", "compile_step")
_PAIRS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Dtypes that parameters are gathered in, and that gradients are reduced in."""


def _on_ranks(case: TrainingStepCase, *steps: str, checkpointed: bool = False) -> list[RankRung]:
    """Those steps of the case, with every pair of dtypes."""
    return [
        RankRung(case.model, case.batch, case.context, dtype, reduce_dtype=reduce, step=step, checkpointed=checkpointed)
        for dtype, reduce in _PAIRS
        for step in steps
    ]


_SHORT = replace(MLP_LADDER.laptop[0], model="mlp-short")

RANK_RUNGS = Grid(
    smoke=_on_ranks(MLP_LADDER.smoke[0], "eager")[:1],
    laptop=[
        *_on_ranks(_SHORT, *RANK_STEPS)[: len(RANK_STEPS)],
        *_on_ranks(_SHORT, "eager")[1:],
        *_on_ranks(_SHORT, "eager", checkpointed=True),
    ],
    paper=[
        rung
        for case in MLP_LADDER.paper[::2]
        for checkpointed in (False, True)
        for rung in _on_ranks(case, *RANK_STEPS, checkpointed=checkpointed)
    ],
)
"""Placements of the compiler, with and without checkpointing, by the dtypes of parameters and of reductions. At laptop
scale each placement once, and a model of one block, as nearly all of the time there is the compiler's.
"""


def _made(case: RankRung) -> list[RankRung]:
    return [replace(case, meta=meta) for meta in (False, True)]


RANK_STAGES = Grid(
    smoke=_made(RANK_RUNGS.smoke[0]),
    laptop=_made(RANK_RUNGS.laptop[0]),
    paper=[case for rung in RANK_RUNGS.paper[:: len(RANK_RUNGS.paper) // 2] for case in _made(rung)],
)
"""One rung of each model, made whole and made on meta."""

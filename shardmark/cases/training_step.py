"""The training step's cases."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid

STEP_MODES = ("forward", "forward_backward", "step")


@dataclass(frozen=True)
class TrainingStepCase:
    """One AdamW step of the language model of that size; `batch` sequences of `context` tokens on each rank.

    `dtype` is what it computes in: "bfloat16" and "float16" are autocast over float32 parameters. `mode` is the part
    that is measured: "forward", "forward_backward" or the whole "step". `attention` names one of that family.
    `bucket_mb`, where given, is the size of the buckets that gradients are communicated in.
    """

    model: str
    batch: int
    context: int
    dtype: str = "float32"
    mode: str = "step"
    attention: str = "sdpa"
    bucket_mb: int | None = None

    def __str__(self) -> str:
        bucket = "" if self.bucket_mb is None else f"-bucket{self.bucket_mb}MB"
        attention = "" if self.attention == "sdpa" else f"-{self.attention}_attention"
        return f"{self.model}-b{self.batch}-s{self.context}-{self.dtype}-{self.mode}{attention}{bucket}"

    @property
    def tokens(self) -> int:
        """Tokens in one rank's batch."""
        return self.batch * self.context


_CONTEXTS = (128, 256, 512, 1024)
_SIZES = ("small", "medium", "large", "xl", "2.7b")
_DTYPES = ("float32", "bfloat16", "float16")

STEP_TIMES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32, mode=mode) for mode in STEP_MODES],
    laptop=[
        *(TrainingStepCase("tiny", batch=4, context=context) for context in _CONTEXTS),
        *(TrainingStepCase("mini", batch=4, context=128, mode=mode) for mode in STEP_MODES),
        TrainingStepCase("mini", batch=4, context=128, dtype="bfloat16"),
        TrainingStepCase("tiny", batch=1, context=64, dtype="float16"),  # few CPUs multiply float16 in hardware
    ],
    paper=[
        TrainingStepCase(model, batch=4, context=context, dtype=dtype, mode=mode)
        for model in _SIZES
        for context in _CONTEXTS
        for dtype in _DTYPES
        for mode in STEP_MODES
    ],
)

STEP_COMPILED = Grid(
    smoke=[],
    laptop=[TrainingStepCase("tiny", batch=4, context=128)],  # compiling takes longer than all else
    paper=STEP_TIMES.paper,
)

STEP_WARMUPS = Grid(
    smoke=STEP_TIMES.smoke[-1:],
    laptop=[TrainingStepCase("mini", batch=4, context=128, mode=mode) for mode in STEP_MODES],
    paper=[case for case in STEP_TIMES.paper if case.dtype == "float32"],
)

STEP_MEMORY = Grid(
    smoke=STEP_TIMES.smoke[-1:],
    laptop=[
        TrainingStepCase("mini", batch=4, context=128),
        TrainingStepCase("mini", batch=4, context=128, dtype="bfloat16"),
        TrainingStepCase("tiny", batch=4, context=1024),
    ],
    paper=[
        TrainingStepCase("2.7b", batch=4, context=context, dtype=dtype, mode=mode)
        for context in _CONTEXTS
        for dtype in _DTYPES[:2]
        for mode in STEP_MODES
    ],
)

STEP_KERNELS = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32, attention="eager")],
    laptop=[TrainingStepCase("mini", batch=4, context=128, attention=attention) for attention in ("eager", "sdpa")],
    paper=[
        TrainingStepCase(model, batch=4, context=context, attention=attention)
        for model in _SIZES
        for context in _CONTEXTS
        for attention in ("eager", "sdpa")
    ],
)
"""Eager attention shows its parts one by one."""

STEP_GOALS = Grid(smoke=[], laptop=[], paper=[TrainingStepCase("2.7b", batch=4, context=1024, dtype="bfloat16")])
"""Where a model's FLOPs should be most of what the machine can do."""

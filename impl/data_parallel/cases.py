"""Cases of a data-parallel training step, beside `TrainingStepCase`: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, OwnModelCase


@dataclass(frozen=True)
class ReductionCase(TrainingStepCase):
    """A step whose gradients are communicated in `reduce_dtype`, "bfloat16" or "float16"."""

    reduce_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{super().__str__()}-reduce_{self.reduce_dtype}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"{super().words} and gradients sent in {self.reduce_dtype}"

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's element while it is communicated."""
        return 2


CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=32)],
    paper=[TrainingStepCase(model, batch=4, context=512, dtype="bfloat16") for model in ("medium", "xl")],
    full=[
        TrainingStepCase(model, batch, context=512, dtype=dtype)
        for batch, dtype in ((4, "bfloat16"), (2, "float32"))  # in float32 as published: a batch of 4 over 2 ranks
        for model in ("small", "medium", "large", "xl")
    ],
    own=OwnModelCase.of,
)

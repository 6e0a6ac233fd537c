"""Cases of a data-parallel training step, beside `TrainingStepCase`: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase


@dataclass(frozen=True)
class ReductionCase(TrainingStepCase):
    """A step whose gradients are communicated in `reduce_dtype`, "bfloat16" or "float16"."""

    reduce_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{super().__str__()}-reduce_{self.reduce_dtype}"

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's element while it is communicated."""
        return 2

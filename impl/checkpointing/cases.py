"""Cases of a training step under activation checkpointing: deep models, whose activations take most of the memory."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, OwnModelCase

CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=64)],
    laptop=[TrainingStepCase("deep", batch=2, context=256)],
    paper=[TrainingStepCase(model, batch=4, context=1024) for model in ("medium", "xl")],
    full=[
        TrainingStepCase(model, batch=4, context=context)
        for model in ("medium", "large", "xl")
        for context in (1024, 2048)
    ],
    own=OwnModelCase.of,
)


@dataclass(frozen=True)
class SegmentsCase(TrainingStepCase):
    """The step under a policy that checkpoints segments of `length` blocks."""

    length: int = 1

    def __str__(self) -> str:
        return f"{super().__str__()}-segments{self.length}"

    @property
    def words(self) -> str:
        return f"{super().words} in segments of {self.length}"

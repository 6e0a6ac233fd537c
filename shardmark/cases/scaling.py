"""The cases of strong and weak scaling."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase
from shardmark.registry import Unsupported


@dataclass(frozen=True)
class ScalingCase:
    """A training step on more and more ranks: "strong" scaling shares one rank's batch out, "weak" gives each as much.

    `batch` is one rank's where it is alone.
    """

    kind: str
    model: str
    batch: int
    context: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.model}-b{self.batch}-s{self.context}-{self.dtype}"

    def on(self, ranks: int) -> TrainingStepCase:
        """One rank's step on that many ranks; Unsupported where they cannot share the batch equally."""
        if self.kind == "strong" and self.batch % ranks:
            raise Unsupported(f"{ranks} ranks cannot share a batch of {self.batch} equally")
        batch = self.batch // ranks if self.kind == "strong" else self.batch
        return TrainingStepCase(self.model, batch, self.context, self.dtype)

    def efficiency(self, ranks: int, ratio: float) -> float:
        """Of `ranks` whose step takes `ratio` times that of one: one is what ranks that cost nothing would reach."""
        return 1 / (ranks * ratio) if self.kind == "strong" else 1 / ratio


KINDS = ("strong", "weak")

SCALING = Grid(
    smoke=[ScalingCase(kind, "tiny", batch=4, context=32) for kind in KINDS],
    laptop=[ScalingCase(kind, "mini", batch=4, context=32) for kind in KINDS],
    paper=[ScalingCase(kind, model, batch=8, context=512) for model in ("small", "large") for kind in KINDS],
)

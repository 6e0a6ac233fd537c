"""The case of a user's own model, of `--model`, in every question about a training step: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.grid import OwnModel, Work


@dataclass(frozen=True)
class OwnModelCase:
    """One AdamW step on each of `ranks`; beside what `impl.training_step.cases.TrainingStepCase` has.

    `model` is what makes it; `dtype` is that of its `parameters`, which are so many; `flops` are those of one rank.
    """

    model: str
    name: str
    dtype: str
    parameters: int
    flops: int
    ranks: int = 1
    mode: str = "step"
    bucket_mb: int | None = None
    batch: int | None = None
    """Rows of each tensor of the batch, where they are to be others than the user's."""
    context: int | None = None
    """The same of their second dimension."""
    checkpointed: bool = False
    """Whether each block's activations are recomputed, under whatever else the strategy does."""
    autocast: bool = False
    """Whether the model and its loss run under autocast to bfloat16."""

    @classmethod
    def of(cls, own: OwnModel) -> OwnModelCase:
        return cls(own.spec, own.name, own.dtype, own.parameters, own.flops)

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.mode}"

    @property
    def work(self) -> Work:
        """Of one rank: every parameter is read twice, its gradient written, and AdamW moves 28 bytes of each."""
        return Work(flops=self.flops, bytes_moved=40 * self.parameters, model_flops=self.flops)

"""Cases of a training step, alone and on more and more ranks: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.registry import Unsupported

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

"""Cases of a training step, on one device and over several world sizes: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.api import Grid, OwnModelCase, Unsupported

STEP_MODES = ("forward", "forward_backward", "step")
CONTEXTS = (128, 256, 512, 1024)
MODELS = ("small", "medium", "large", "xl", "2.7b")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TrainingStepCase:
    """One AdamW step of the language model of that size; `batch` sequences of `context` tokens on each rank.

    `dtype` is that of computation: "bfloat16" and "float16" are autocast over float32 parameters. `mode` is the part
    that is measured: "forward", "forward_backward" or the full "step". `attention` names an implementation of
    attention. `bucket_mb` is the size of the buckets that gradients are communicated in; None is the wrapper's default.
    `autocast_loss` leaves the dtypes of the loss to autocast, which keeps log-probabilities in half precision on CUDA;
    otherwise logits are cast to float32 first.
    """

    model: str
    batch: int
    context: int
    dtype: str = "float32"
    mode: str = "step"
    attention: str = "sdpa"
    bucket_mb: int | None = None
    autocast_loss: bool = False

    def __str__(self) -> str:
        bucket = "" if self.bucket_mb is None else f"-bucket{self.bucket_mb}MB"
        attention = "" if self.attention == "sdpa" else f"-{self.attention}_attention"
        loss = "-autocast_loss" if self.autocast_loss else ""
        return f"{self.model}-b{self.batch}-s{self.context}-{self.dtype}-{self.mode}{attention}{bucket}{loss}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        dtype = "" if self.dtype == "float32" else f" in {self.dtype}"
        loss = ", loss included" if self.autocast_loss else ""
        mode = "" if self.mode == "step" else f" in {self.mode.replace('_', ' and ')}"
        bucket = "" if self.bucket_mb is None else f" in buckets of {self.bucket_mb} MB"
        attention = "" if self.attention == "sdpa" else f" with {self.attention} attention"
        return f"with the {self.model} model at {self.context:,} tokens{dtype}{loss}{mode}{attention}{bucket}"

    @property
    def tokens(self) -> int:
        """Tokens in one rank's batch."""
        return self.batch * self.context


@dataclass(frozen=True)
class ScalingCase:
    """A training step on a growing number of ranks.

    `kind` is "strong", where the ranks share a batch of `batch` sequences, or "weak", where each rank has that many.
    """

    kind: str
    model: str
    batch: int
    context: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.model}-b{self.batch}-s{self.context}-{self.dtype}"

    def on(self, ranks: int) -> TrainingStepCase:
        """The case of each rank's step on that many ranks; Unsupported if they cannot share the batch equally."""
        if self.kind == "strong" and self.batch % ranks:
            raise Unsupported(f"{ranks} ranks cannot share a batch of {self.batch} equally")
        batch = self.batch // ranks if self.kind == "strong" else self.batch
        return TrainingStepCase(self.model, batch, self.context, self.dtype)

    def efficiency(self, ranks: int, ratio: float) -> float:
        """Scaling efficiency if the step on `ranks` ranks takes `ratio` times the step of one rank; 1 is ideal."""
        return 1 / (ranks * ratio) if self.kind == "strong" else 1 / ratio


STEP_TIMES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32, mode=mode) for mode in STEP_MODES],
    laptop=[
        *(TrainingStepCase("tiny", batch=4, context=context) for context in CONTEXTS),
        *(TrainingStepCase("mini", batch=4, context=128, mode=mode) for mode in STEP_MODES),
        TrainingStepCase("mini", batch=4, context=128, dtype="bfloat16"),
        TrainingStepCase("tiny", batch=1, context=64, dtype="float16"),  # few CPUs multiply float16 in hardware
    ],
    paper=[
        *(TrainingStepCase(model, batch=4, context=512, dtype="bfloat16") for model in MODELS),
        *(TrainingStepCase("medium", batch=4, context=context) for context in CONTEXTS),
        *(TrainingStepCase("medium", batch=4, context=512, mode=mode) for mode in STEP_MODES[:2]),
    ],
    full=[
        TrainingStepCase(model, batch=4, context=context, dtype=dtype, mode=mode)
        for model in MODELS
        for context in CONTEXTS
        for dtype in DTYPES
        for mode in STEP_MODES
    ],
    own=OwnModelCase.of,
)

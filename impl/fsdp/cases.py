"""Cases of a training step with parameters, gradients and optimizer state sharded: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, OwnModelCase


@dataclass(frozen=True)
class FSDPCase(TrainingStepCase):
    """One fully sharded step on that many `ranks`.

    `dtype` is what parameters are cast to before the all-gather and gradients before the reduce-scatter; shards, their
    gradients and the optimizer's state are in float32, and with `offload` in the host's memory.
    """

    ranks: int = 2
    offload: bool = False

    def __str__(self) -> str:
        return super().__str__() + "-offload" * self.offload

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return super().words + " with offload" * self.offload


@dataclass(frozen=True)
class RankRung(TrainingStepCase):
    """A rung of the MLP ladder on that many ranks, fully sharded; `step` names an implementation of training_step.

    `dtype` is what parameters are gathered and multiplied in, `reduce_dtype` what gradients are summed in. With `meta`
    the model is made on the meta device, so that no rank ever holds all of it.
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

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        reduced = "" if self.reduce_dtype == "float32" else f" and gradients summed in {self.reduce_dtype}"
        options = " with checkpointing" * self.checkpointed + " made whole on each rank" * (not self.meta)
        return f"{super().words}{options}{reduced}"


WRAPS = ("linears", "thirds", "whole")
"""Units: each linear, each third of the linears, or the root module alone."""
WRAP_WORDS = dict(zip(WRAPS, ("each linear", "each third of them", "all of them"), strict=True))


@dataclass(frozen=True)
class NineLinearsCase:
    """One step of SGD of `linears` layers from `width` to `width`; `batch` rows on each of `ranks`.

    `wrap`, of `WRAPS`, says what becomes a unit; "thirds" needs a number of linears that divides by three.
    """

    width: int
    batch: int
    linears: int = 9
    wrap: str = "linears"
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        wrap = "" if self.wrap == "linears" else f"-{self.wrap}"
        return f"{self.linears}x{self.width}-b{self.batch}{wrap}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        wrap = "" if self.wrap == "linears" else f" with {WRAP_WORDS[self.wrap]} as a unit"
        return f"with {self.linears} linears of width {self.width:,}{wrap}"


CASES = Grid(
    smoke=[FSDPCase("tiny", batch=2, context=32)],
    laptop=[FSDPCase("mini", batch=2, context=32)],
    paper=[FSDPCase(model, batch=4, context=512, dtype="bfloat16") for model in ("medium", "xl")],
    full=[
        FSDPCase(model, batch=4, context=512, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for model in ("small", "medium", "large", "xl")
    ],
    own=OwnModelCase.of,
)

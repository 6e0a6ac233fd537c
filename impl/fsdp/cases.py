"""Cases of a training step with everything sharded over the ranks: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.training_step.cases import TrainingStepCase


@dataclass(frozen=True)
class FSDPCase(TrainingStepCase):
    """One step with everything sharded over `ranks`, which its memory depends on.

    `dtype` is what parameters are cast to before they are gathered and gradients before they are reduced; shards,
    their gradients and the optimizer stay in float32.
    """

    ranks: int = 2


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


WRAPS = ("linears", "thirds", "whole")
"""What becomes a unit: each linear, each third of them, all."""


@dataclass(frozen=True)
class NineLinearsCase:
    """One step of plain SGD of `linears` layers from `width` to `width`; `batch` rows on each of `ranks`.

    `wrap` is what sharding gathers at once, of `WRAPS`: thirds of a number that divides by three. With `offload` what
    a rank keeps is in host memory.
    """

    width: int
    batch: int
    linears: int = 9
    wrap: str = "linears"
    offload: bool = False
    ranks: int = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        wrap = "" if self.wrap == "linears" else f"-{self.wrap}"
        return f"{self.linears}x{self.width}-b{self.batch}{wrap}{'-offload' * self.offload}"

    @property
    def linears_a_unit(self) -> int:
        """How many are gathered at once."""
        return {"linears": 1, "thirds": self.linears // 3, "whole": self.linears}[self.wrap]

"""The optimizer step's cases."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.cases.grid import Grid

CLIPPING = ("none", "in_step", "before_step")


@dataclass(frozen=True)
class OptimizerCase:
    """One step over the parameters of the language model of that size, gradients in the parameters' dtype.

    `clipping` by global norm is "none", "in_step" (the optimizer's own `max_grad_norm` where it has one, else as next)
    or "before_step" (`torch.nn.utils.clip_grad_norm_`, then the step).
    """

    model: str
    dtype: str = "float32"
    master_weights: bool = False
    clipping: str = "none"

    def __str__(self) -> str:
        master = "-master" if self.master_weights else ""
        clipping = "" if self.clipping == "none" else f"-clip_{self.clipping}"
        return f"{self.model}-{self.dtype}{master}{clipping}"


def _each_dtype(*models: str) -> list[OptimizerCase]:
    return [
        case
        for model in models
        for case in (OptimizerCase(model), OptimizerCase(model, dtype="bfloat16", master_weights=True))
    ]


OPTIMIZER_STEP = Grid(
    smoke=_each_dtype("tiny"),
    laptop=_each_dtype("mini"),
    paper=_each_dtype("medium", "xl", "2.7b"),
)

CLIPPED_STEP = Grid(
    smoke=[OptimizerCase("tiny", clipping=clipping) for clipping in CLIPPING],
    laptop=[OptimizerCase("mini", clipping=clipping) for clipping in CLIPPING],
    paper=[OptimizerCase(model, clipping=clipping) for model in ("medium", "xl") for clipping in CLIPPING],
)

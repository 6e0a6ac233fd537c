"""A case of an optimizer step: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

CLIPPING = ("none", "in_step", "before_step")


@dataclass(frozen=True)
class OptimizerCase:
    """One step over the parameters of the language model of that size, gradients in the parameters' dtype.

    `clipping` by global norm is "none", "before_step" (`torch.nn.utils.clip_grad_norm_`, then the step) or "in_step"
    (the optimizer's own `max_grad_norm`; "before_step" if it has none).
    """

    model: str
    dtype: str = "float32"
    master_weights: bool = False
    clipping: str = "none"

    def __str__(self) -> str:
        master = "-master" if self.master_weights else ""
        clipping = "" if self.clipping == "none" else f"-clip_{self.clipping}"
        return f"{self.model}-{self.dtype}{master}{clipping}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        dtype = "" if self.dtype == "float32" else f" in {self.dtype}"
        master = " with master weights" * self.master_weights
        clipping = "" if self.clipping == "none" else f", gradients clipped {self.clipping.replace('_', ' the ')}"
        return f"for the parameters of the {self.model} model{dtype}{master}{clipping}"

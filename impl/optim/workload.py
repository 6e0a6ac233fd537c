"""One optimizer step over a language model's parameters."""

from __future__ import annotations

from typing import Any

import torch

from impl.model import SIZES
from impl.optim.accounting import shapes
from impl.optim.cases import OptimizerCase
from shardmark.api import Implementation, Mark, Unsupported

MAX_NORM = 1.0


class OptimizerStep:
    """A step over a language model's parameters, with random gradients so large that clipping scales them."""

    def __init__(self, implementation: Implementation, case: OptimizerCase, device: str) -> None:
        options: dict[str, Any] = {}
        if case.master_weights:
            if not implementation.accepts("master_weights"):
                raise Unsupported(f"{implementation} takes no master_weights")
            options["master_weights"] = True
        in_step = case.clipping == "in_step" and implementation.accepts("max_grad_norm")
        if in_step:
            options["max_grad_norm"] = MAX_NORM
        dtype = getattr(torch, case.dtype)
        self.parameters = []
        for shape in shapes(SIZES[case.model]):
            p = torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02).requires_grad_()
            p.grad = torch.empty_like(p, requires_grad=False).normal_()
            self.parameters.append(p)
        self.optimizer = implementation.adapted(self.parameters, **options)
        self.clips_before = case.clipping != "none" and not in_step
        self.backend = "clip_grad_norm_" if self.clips_before else "in step" if in_step else "no clipping"

    def prepare(self) -> None:
        """Nothing to reset: each step uses the same gradients."""

    def step(self, mark: Mark) -> None:
        if self.clips_before:
            torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        mark("optimizer")

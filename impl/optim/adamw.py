"""AdamW as in the paper, one parameter after another: the reference.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, with the operations in the order of
torch's own for-loop implementation, so that the two are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from impl.optim.accounting import adamw_peak
from impl.optim.base import HALF, MASTER, AdamWBase, dense_gradient
from shardmark.api import Race, register


class AdamW(AdamWBase):
    """`AdamW(params, lr, betas, eps, weight_decay, max_grad_norm=None, master_weights=False)`.

    Contract and errors: `impl.optim.Optimizer`. A step has one temporary as large as a parameter at a time.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.evaluate(closure)
        clip = None if self.max_grad_norm is None else self._clip_coefficient(self.max_grad_norm)
        if self.grad_norm is not None and not self.grad_norm.isfinite():
            return loss
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, clip, group)
        return loss

    def _update(self, p: Tensor, clip: Tensor | None, group: dict[str, Any]) -> None:
        state = self.state_of(p)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        grad = dense_gradient(p).to(m.dtype)
        if clip is not None:
            grad = (grad * clip).to(m.dtype)  # without dimensions both: the product has the wider dtype
        weight = state[MASTER] if self.has_master(p) else p

        beta1, beta2 = group["betas"]
        state["step"] += 1
        t = state["step"].item()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        m.lerp_(grad, 1 - beta1)  # m = beta1 m + (1 - beta1) grad
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        weight.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**t))
        if weight is not p:
            p.copy_(weight)

    def _clip_coefficient(self, max_norm: float) -> Tensor | None:
        """The factor by which `clip_grad_norm_` would scale gradients; None without gradients."""
        grads = [dense_gradient(p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            self.grad_norm = None
            return None
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32 if g.dtype in HALF else None) for g in grads]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        return (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)


register("optimizer", "plain", AdamW, memory=adamw_peak, time=Race("torch_fused"), called="the plain AdamW")

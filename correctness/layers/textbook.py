"""Textbook layers with a backward pass of their own, step by step; each planted defect changes one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.layers import check_gated, check_norm, check_rotary, statistics_dtype


class Norm(torch.autograd.Function):
    """Correct: `Norm.apply(x, weight, eps)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(statistics_dtype(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return (*norm_gradients(x, weight, scale, grad), None)


def norm_gradients(x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    wide, given = x.to(scale.dtype) * scale, grad.to(scale.dtype)
    of_normed = given * weight
    of_x = scale * (of_normed - wide * (of_normed * wide).mean(-1, keepdim=True))
    of_weight = (given * wide).reshape(-1, x.shape[-1]).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


class Gated(torch.autograd.Function):
    """Correct: `Gated.apply(gate, up)`; backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        wide = gate.to(statistics_dtype(gate))
        return (wide * wide.sigmoid() * up).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gated_gradients(*ctx.saved_tensors, grad)


def gated_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    wide, given = gate.to(statistics_dtype(gate)), grad.to(statistics_dtype(gate))
    sigmoid = wide.sigmoid()
    of_gate = given * up * sigmoid * (1 + wide * (1 - sigmoid))
    return of_gate.to(gate.dtype), (given * wide * sigmoid).to(up.dtype)


class Turned(torch.autograd.Function):
    """Correct: `Turned.apply(x, cos, sin)`; backward turns the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated, in float32 or wider."""
    wide = x.to(statistics_dtype(x))
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Textbook:
    """Correct. A defect derives from it, and has another Function or another method."""

    norm: Any = Norm
    gate: Any = Gated
    turn: Any = Turned

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        check_norm(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm.apply(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        check_norm(x, weight, residual)
        total = x + residual
        return self.rms_norm(total, weight, eps=eps), total

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        check_gated(gate, up)
        with torch.autocast(gate.device.type, enabled=False):
            return self.gate.apply(gate, up)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        check_rotary(q, k, cos, sin)
        with torch.autocast(q.device.type, enabled=False):
            return self.turn.apply(q, cos, sin), self.turn.apply(k, cos, sin)

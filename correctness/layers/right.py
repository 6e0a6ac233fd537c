"""Right layers that work in unusual ways: the tests must accept them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from correctness.layers.textbook import Norm, Textbook, norm_gradients
from correctness.support.planting import right
from impl.layers import statistics_dtype
from shardmark.api import Unsupported


@right("Functions with a backward of their own, of @once_differentiable; what they keep is what they are given")
class StepByStep(Textbook):
    pass


@right("a class with one function alone: what is missing is refused")
class OnlyANorm:
    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.shape[-1:] != weight.shape or not x.shape[-1] or x.device != weight.device:
            raise ValueError("in words\nof its own")
        half = x.dtype in (torch.bfloat16, torch.float16)
        if not x.is_floating_point() or weight.dtype not in {x.dtype, torch.float32 if half else x.dtype}:
            raise ValueError("dtypes")
        rms = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return (x / torch.hypot(rms, torch.full_like(rms, eps**0.5)) * weight).to(x.dtype)


@right("casts the normed row to x's dtype before its product with weight, as Hugging Face's Llama does")
class RoundsTwice(Textbook):
    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        normed = super().rms_norm(x, torch.ones_like(weight, dtype=x.dtype), eps=eps)
        if weight.shape != x.shape[-1:]:
            raise ValueError("shapes")
        return _Times.apply(normed, weight)


class _Times(torch.autograd.Function):
    """A product of which weight's gradient is summed in float32."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(normed, weight)
        return (normed * weight).to(normed.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        normed, weight = ctx.saved_tensors
        wide = statistics_dtype(normed)
        of_weight = (grad.to(wide) * normed).reshape(-1, weight.shape[0]).sum(0)
        return (grad * weight).to(normed.dtype), of_weight.to(weight.dtype)


class _AnyOrder(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_x, _ = norm_gradients(x, weight, scale, grad)
        parts = list((grad.to(scale.dtype) * (x * scale)).reshape(-1, x.shape[-1]).split(5))
        random.Random(id(grad)).shuffle(parts)
        total = torch.zeros(weight.shape, dtype=scale.dtype, device=x.device)
        for part in parts:
            total += part.sum(0)
        return of_x, total.to(weight.dtype), None


@right("adds the rows of weight's gradient in any order, as atomic additions do, so equal calls differ in last bits")
class AnyOrder(Textbook):
    norm = _AnyOrder


class _Once(Norm):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if getattr(ctx, "ran", False):
            raise RuntimeError("a second backward pass needs a second forward pass")
        ctx.ran = True
        x, weight, scale = ctx.saved_tensors
        return (*norm_gradients(x, weight, scale, grad), None)


@right("refuses float64 as Unsupported, a norm has one backward pass, and complex numbers rotate q and k")
class OfComplexNumbers(Textbook):
    norm = _Once

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if x.dtype == torch.float64:
            raise Unsupported("no float64 here")
        return super().rms_norm(x, weight, eps=eps)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        super().rotary(q.detach(), k.detach(), cos, sin)  # for its errors
        with torch.autocast(q.device.type, enabled=False):
            turns = torch.complex(cos.double(), sin.double())
            pairs = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
            turned_q, turned_k = (torch.view_as_real(each * turns).flatten(-2) for each in pairs)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

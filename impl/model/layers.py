"""The layers of the transformer, without biases and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from impl.attention import Attention

CUT = 3.0
"""Weights are drawn from a normal distribution truncated at this many standard deviations."""


@torch.no_grad()
def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill `weight` from a normal distribution with mean 0, that standard deviation, truncated at CUT of them.

    Applies the inverse distribution function to uniform values. `nn.init.trunc_normal_` draws values outside again,
    which takes five times as long and temporaries as large as the weight.
    """
    within = math.erf(CUT / math.sqrt(2))  # probability of the interval between the cuts
    # In half precision uniform values would be rounded down, and their mean would be 0.01 too low.
    drawn = torch.empty_like(weight, dtype=torch.float32) if weight.element_size() < 4 else weight
    drawn.uniform_(-within, within).erfinv_().mul_(std * math.sqrt(2)).clamp_(-CUT * std, CUT * std)
    if drawn is not weight:
        weight.copy_(drawn)


class Linear(nn.Linear):
    """(..., inputs) -> (..., outputs), no bias; weights from a truncated normal of variance 2 / (inputs + outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights: Glorot and Bengio, 2010, truncated."""
        std = (2 / (self.in_features + self.out_features)) ** 0.5
        truncated_normal_(self.weight, std)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich, 2019); (..., d_model) in and out, same dtype."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class RotaryEmbedding(nn.Module):
    """Rotate each pair (x[2i], x[2i+1]) by the angle position / theta^(2i / head_dim) (Su et al., RoFormer, 2021).

    x: (batch, heads, context, head_dim), the same shape and dtype out.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context_length: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim, self.context_length, self.theta = head_dim, context_length, theta
        angles = self._angles()
        # Not persistent: the model's sizes determine them.
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def _angles(self) -> Tensor:
        frequencies = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        return torch.outer(torch.arange(self.context_length, dtype=torch.float64), frequencies)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Compute the tables again after each move: from bfloat16 back to float32 they would stay rounded, and
        `to_empty` leaves them unwritten, while no state has them."""
        super()._apply(fn, recurse)
        if not self.cos.is_meta:
            angles = self._angles()
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())
        return self

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))  # (context, head_dim / 2)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with RoPE: (batch, context, d_model) -> the same shape."""

    def __init__(self, d_model: int, heads: int, rotary: RotaryEmbedding, attention: Attention) -> None:
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.rotary = rotary
        self.query, self.key, self.value, self.output = (Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (batch, heads, context, head_dim)
        mixed = self.attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x) (Shazeer, "GLU Variants Improve Transformer", 2020); (..., d_model) in and out."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x)); (batch, context, d_model) in and out."""

    def __init__(self, d_model: int, d_ff: int, heads: int, rotary: RotaryEmbedding, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.attention = CausalSelfAttention(d_model, heads, rotary, attention)
        self.feed_forward_norm = RMSNorm(d_model)
        self.feed_forward = SwiGLU(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

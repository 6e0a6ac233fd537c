"""A transformer as one function with a method per part: the base of planted defects."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from impl.model import PlainTransformer


class Parts(PlainTransformer):
    """The reference transformer with a method per part."""

    eps, base = 1e-5, 10_000.0

    def forward(self, tokens: Tensor) -> Tensor:
        self.check(tokens)
        w = dict(self.named_parameters())
        x = w["embedding.weight"][tokens]
        for i in range(self.size.layers):
            x = self.block(x, {name.removeprefix(f"blocks.{i}."): p for name, p in w.items()})
        return self.project(self.rms_norm(x, w["norm.weight"]), w)

    def check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.shape[1] > self.context_length:
            raise ValueError(f"a context of up to {self.context_length}, got {tuple(tokens.shape)}")
        if tokens.device.type == "cpu" and not 0 <= tokens.min() <= tokens.max() < self.size.vocab:
            raise ValueError(f"token ids below {self.size.vocab}, got another")

    def block(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        normed = self.rms_norm(x, w["attention_norm.weight"])
        q, k, v = (self.heads(normed @ w[f"attention.{name}.weight"].T) for name in ("query", "key", "value"))
        x = x + self.attend(self.rotate(q), self.rotate(k), v) @ w["attention.output.weight"].T
        normed = self.rms_norm(x, w["feed_forward_norm.weight"])
        w1, w2, w3 = (w[f"feed_forward.w{n}.weight"] for n in (1, 2, 3))
        return x + self.gated(normed @ w1.T, normed @ w3.T) @ w2.T

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)  # (batch, heads, context, head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(self.scale())
        scores = scores.masked_fill(~self.mask(q.shape[-2], q.device), -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)

    def scale(self) -> int:
        return self.size.head_dim

    def mask(self, context: int, device: Any) -> Tensor:
        return torch.ones(context, context, dtype=torch.bool, device=device).tril()

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.tables(x)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(x)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def angles(self, x: Tensor) -> Tensor:
        return torch.outer(self.positions(x.shape[-2], x), self.frequencies(x))

    def positions(self, context: int, x: Tensor) -> Tensor:
        return torch.arange(context, dtype=torch.float64, device=x.device)

    def frequencies(self, x: Tensor) -> Tensor:
        return self.base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.gate(gate) * up

    def gate(self, x: Tensor) -> Tensor:
        return silu(x)

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return x @ w["output.weight"].T

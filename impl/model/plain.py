"""The transformer in one function, written from the papers: the reference.

It shares no code with `layers`: RoPE multiplies complex numbers, and attention is the formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from impl.model.sizes import TransformerSize
from impl.model.transformer import Transformer
from shardmark.api import register


class PlainTransformer(nn.Module):
    """Contract and errors: `impl.model.Model`."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__()
        self.size = size
        self.context_length = context_length
        # Only for the parameters' names and shapes.
        for name, child in Transformer(size, context_length=context_length).named_children():
            self.add_module(name, child)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or tokens.shape[1] > self.context_length:
            raise ValueError(f"tokens are (batch, context up to {self.context_length}), got {tuple(tokens.shape)}")
        w = dict(self.named_parameters())
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.size.vocab:
            raise ValueError(f"token ids go from 0 to {self.size.vocab - 1}, got {tokens.min()} to {tokens.max()}")
        x = w["embedding.weight"][tokens]  # (batch, context, d_model)
        for i in range(self.size.layers):
            normed = _rms_norm(x, w[f"blocks.{i}.attention_norm.weight"])
            q, k, v = (
                (normed @ w[f"blocks.{i}.attention.{name}.weight"].T).unflatten(-1, (self.size.heads, -1))
                for name in ("query", "key", "value")
            )  # (batch, context, heads, head_dim)
            scores = torch.einsum("bqhd,bkhd->bhqk", _rotate(q), _rotate(k)) / math.sqrt(self.size.head_dim)
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
            probs = torch.where(mask, scores, -math.inf).softmax(-1)
            mixed = torch.einsum("bhqk,bkhd->bqhd", probs, v).flatten(-2)
            x = x + mixed @ w[f"blocks.{i}.attention.output.weight"].T
            normed = _rms_norm(x, w[f"blocks.{i}.feed_forward_norm.weight"])
            w1, w2, w3 = (w[f"blocks.{i}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
            gate = normed @ w1.T
            x = x + (gate * torch.sigmoid(gate) * (normed @ w3.T)) @ w2.T
        return _rms_norm(x, w["norm.weight"]) @ w["output.weight"].T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _rotate(x: Tensor) -> Tensor:
    """RoPE as multiplication of complex numbers; x: (batch, context, heads, head_dim)."""
    context, head_dim = x.shape[1], x.shape[-1]
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=x.device) / head_dim)
    positions = torch.arange(context, dtype=torch.float64, device=x.device)
    rotations = torch.polar(torch.ones(()).double().to(x.device), torch.outer(positions, frequencies))[None, :, None, :]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)


register("model", "plain", PlainTransformer)

"""Decoder-only language models as the sources of `training_steps.csv` write them: Llama, MPT and GPT-2.

All operators are PyTorch's own and run one by one, as without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class DecoderSize:
    """A model's sizes. `family` is "llama" (RMSNorm, RoPE, SwiGLU), "mpt" or "gpt2" (LayerNorm, learned positions,
    GELU, tied output; MPT without biases)."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab: int

    @property
    def products(self) -> int:
        """Parameters that a token is multiplied with."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        ffn = self.width * self.ffn_width * (3 if self.family == "llama" else 2)
        return self.layers * (attention + ffn) + self.width * self.vocab


class WideRMSNorm(nn.Module):
    """Computes in float32, as Llama's own code does. Where backward needs no float32 input, it is freed before the
    result is rounded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x.float()).type_as(x) * self.weight


def normalized(x: Tensor) -> Tensor:
    """`x` over the root of its mean square in the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in float32; `x` is (batch, heads, length, head), the others (length, head)."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).type_as(x)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, size: DecoderSize, length: int) -> None:
        super().__init__()
        self.size, self.head = size, size.width // size.heads
        llama, bias = size.family == "llama", size.family == "gpt2"
        norm = WideRMSNorm if llama else partial(nn.LayerNorm, bias=bias)
        linear: Callable[[int, int], nn.Module] = partial(nn.Linear, bias=bias)
        self.norm_1, self.norm_2 = norm(size.width), norm(size.width)
        key = self.head * size.kv_heads
        if llama:
            self.query, self.key, self.value = linear(size.width, size.width), linear(size.width, key), None
            self.value = linear(size.width, key)
            self.gate = linear(size.width, size.ffn_width)
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(length, self.head), persistent=False)
        else:
            self.qkv = linear(size.width, 3 * size.width)
        self.output = linear(size.width, size.width)
        self.up, self.down = linear(size.width, size.ffn_width), linear(size.ffn_width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_1(x))
        return x + self._feed_forward(self.norm_2(x))

    def _attend(self, x: Tensor) -> Tensor:
        if self.size.family == "llama":
            each = [self.query(x), self.key(x), self.value(x)]
        else:
            each = list(self.qkv(x).chunk(3, -1))
        q, k, v = (one.unflatten(-1, (-1, self.head)).transpose(1, 2) for one in each)
        if self.size.family == "llama":
            q, k = _rotated(q, self.cos, self.sin), _rotated(k, self.cos, self.sin)
            if (times := self.size.heads // self.size.kv_heads) > 1:
                k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.size.family == "llama":
            return self.down(silu(self.gate(x)) * self.up(x))
        return self.down(gelu(self.up(x)))


class Decoder(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, size: DecoderSize, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.positions = None if size.family == "llama" else nn.Embedding(length, size.width)
        self.blocks = nn.ModuleList(Block(size, length) for _ in range(size.layers))
        self.norm = WideRMSNorm(size.width) if size.family == "llama" else nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.vocab, bias=False)
        if size.family != "llama":
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in float32 as all sources compute it."""
    return cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

"""A small decoder-only transformer, under the names that plans of parallelism are written for (Llama's).

    model = Decoder(DecoderSize(experts=4))
    loss = token_losses(model, batch) / token_count(batch)

Each layer's attention views its products by heads, however many of them a rank has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

IGNORED = -100
"""A target that has no loss."""

Batch = tuple[Tensor, Tensor, Tensor]
"""tokens, their positions in the context, and targets: each (rows, context) int64."""


@dataclass(frozen=True)
class DecoderSize:
    """Sizes that 2, 3, 4 and 6 divide. `experts` of 0: each layer has one feed-forward network. `fused`: queries, keys
    and values are one product. Dropout is of what each network adds (`hidden_dropout`), and of attention's weights."""

    dim: int = 24
    layers: int = 2
    heads: int = 12
    kv_heads: int = 6
    hidden: int = 48
    vocabulary: int = 48
    experts: int = 0
    tied: bool = False
    fused: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary positions; x: (rows, context, dim). Rows of a fused product are
    those of each group after the other: its heads of queries, its keys, its values, as Megatron-LM has them."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.head_dim, self.dropout = size.dim // size.heads, size.attention_dropout
        kv = size.kv_heads * self.head_dim
        self.per_group, self.fused = size.heads // size.kv_heads, size.fused
        if self.fused:
            self.wqkv = nn.Linear(size.dim, size.dim + 2 * kv, bias=False)
        else:
            self.wq = nn.Linear(size.dim, size.heads * self.head_dim, bias=False)
            self.wk = nn.Linear(size.dim, kv, bias=False)
            self.wv = nn.Linear(size.dim, kv, bias=False)
        self.wo = nn.Linear(size.heads * self.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.fused:
            every = of_groups(self.wqkv(x), self.per_group, self.head_dim)
        else:
            every = tuple(each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in every)
        mixed = self.attend(rotated(q, positions), rotated(k, positions), v)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(rows, heads, context, head_dim) each, with fewer heads in k and v."""
        return causal_attention(q, k, v, self.dropout if self.training else 0.0)


def of_groups(fused: Tensor, per_group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (..., heads, head_dim) of a fused product (..., groups * (per_group + 2) * head_dim)."""
    groups = fused.unflatten(-1, (-1, per_group + 2, head_dim))
    return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021) of x: (rows, heads, context, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Every expert's two matrices, stacked: w1 (experts, hidden, dim) and w2 (experts, dim, hidden)."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """The experts' outputs by each token's shares; x: (tokens, dim), shares: (tokens, experts)."""
        hidden = silu(torch.einsum("td,ehd->teh", x, self.w1))
        return torch.einsum("teh,edh,te->td", hidden, self.w2, shares)


class MixtureOfExperts(nn.Module):
    """The two experts with the largest shares of each token (Shazeer et al., 2017), their shares scaled to 1."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.dim, size.experts, bias=False)
        self.experts = Experts(size.experts, size.dim, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        shares = self.router(flat).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(2, -1).indices, 1.0)
        kept = shares * chosen
        return self.experts(flat, kept / kept.sum(-1, keepdim=True)).view_as(x)


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size.dim, 1e-5), nn.RMSNorm(size.dim, 1e-5)
        self.attention = Attention(size)
        self.feed_forward: nn.Module = MixtureOfExperts(size) if size.experts else FeedForward(size.dim, size.hidden)
        self.dropout = nn.Dropout(size.hidden_dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Decoder(nn.Module):
    """(tokens, positions) -> logits (rows, context, vocabulary)."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.size = size
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, 1e-5)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)
        if size.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.output(self.norm(x))


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the cross entropies of all targets but IGNORED ones."""
    tokens, positions, targets = batch
    return losses_of(model(tokens, positions), targets)


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of logits (rows, context, vocabulary) for all targets but IGNORED ones: at
    least in float32, as a half has no digits for a sum of thousands."""
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def token_count(batch: Batch) -> Tensor:
    """Number of targets that are not IGNORED."""
    return (batch[2] != IGNORED).sum()

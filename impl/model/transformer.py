"""A decoder-only transformer language model: pre-norm RMSNorm, RoPE, causal attention, SwiGLU, untied output."""

from __future__ import annotations

from torch import Tensor, nn

from impl.attention import Attention, sdpa
from impl.model.layers import Block, Linear, RMSNorm, RotaryEmbedding, truncated_normal_
from impl.model.sizes import TransformerSize
from shardmark.api import register


class Transformer(nn.Module):
    """tokens (batch, context) int64 -> logits (batch, context, vocab). Contract and errors: `impl.model.Model`.

    `attention` is a function with the contract `impl.attention.Attention`.
    """

    def __init__(self, size: TransformerSize, *, context_length: int, attention: Attention = sdpa) -> None:
        super().__init__()
        self.size = size
        self.context_length = context_length
        self.embedding = nn.Embedding(size.vocab, size.d_model)
        truncated_normal_(self.embedding.weight, 1.0)
        rotary = RotaryEmbedding(size.head_dim, context_length)  # one table for all layers
        self.blocks = nn.ModuleList(
            Block(size.d_model, size.d_ff, size.heads, rotary, attention) for _ in range(size.layers)
        )
        self.norm = RMSNorm(size.d_model)
        self.output = Linear(size.d_model, size.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or tokens.shape[1] > self.context_length:
            raise ValueError(f"tokens are (batch, context up to {self.context_length}), got {tuple(tokens.shape)}")
        try:
            x = self.embedding(tokens)  # (batch, context, d_model)
        except IndexError:
            raise ValueError(f"token ids go from 0 to {self.size.vocab - 1}, got one that does not") from None
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))  # (batch, context, vocab)


register("model", "transformer", Transformer)

"""A decoder as users compile it: as a whole, block by block, or with its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS = 128, 4, 500


class Block(nn.Module):
    """(rows, context, WIDTH) -> the same: attention, written out or `fused`, and a feed-forward network."""

    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, context, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / 8).masked_fill(hidden, float("-inf"))
            out = self.dropout(scores.softmax(-1)) @ v
        x = x + self.dropout(self.attended(out.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(gelu(self.up(self.second(x)))))


class Net(nn.Module):
    """Tokens (rows, context) -> logits (rows, context, WORDS)."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(dropout, fused) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.output(x)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _made(model: nn.Module, loss: Callable[..., Tensor] = loss, compiled: bool = True) -> dict[str, Any]:
    if compiled:
        model.compile()
    tokens = torch.zeros(4, 128, dtype=torch.long)
    return {"model": model, "batch": (tokens, tokens), "loss": loss, "blocks": model.layers}


def eager() -> dict[str, Any]:
    return _made(Net(), compiled=False)


def whole() -> dict[str, Any]:
    return _made(Net())


def blocks() -> dict[str, Any]:
    model = Net()
    for layer in model.layers:
        layer.compile()
    return _made(model, compiled=False)


def with_loss() -> dict[str, Any]:
    return _made(Net(), torch.compile(loss), compiled=False)


def checkpointed() -> dict[str, Any]:
    return _made(Net(checkpointed=True))


def dropping() -> dict[str, Any]:
    return _made(Net(dropout=0.1))


def fused_attention() -> dict[str, Any]:
    return _made(Net(fused=True))


def eager_in_bfloat16() -> dict[str, Any]:
    return _made(Net().bfloat16(), compiled=False)


def in_bfloat16() -> dict[str, Any]:
    return _made(Net().bfloat16())

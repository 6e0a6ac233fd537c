"""Tensor parallelism and FSDP2 of a model of one's own, on any mesh of both.

pytest correctness --model examples/parallelize.py:make --impl mesh=examples/parallelize.py:parallelize \
    --mesh shard=2 --mesh tp=2 --mesh shard=2,tp=2
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm; products are cut by heads and by hidden features."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (each(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class GPT(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, head_dim=8) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make() -> tuple:
    return GPT(), (torch.randint(64, (4, 17)),), loss


def parallelize(model, mesh):
    """`mesh` has axes among dp, shard and tp."""
    if "tp" in mesh.mesh_dim_names:
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = dict.fromkeys(("q", "k", "v", "gate", "up"), column) | {"out": row, "down": row}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
    rows = tuple(name for name in ("dp", "shard") if name in mesh.mesh_dim_names)
    if rows:
        for block in model.blocks:
            fully_shard(block, mesh=mesh[rows])
        fully_shard(model, mesh=mesh[rows])
    return model

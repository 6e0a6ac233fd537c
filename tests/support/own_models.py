"""Models as users have them, for `--model`: right ones, and some with what is wrong planted."""

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.checkpoint import checkpoint

from shardmark.predict.simulation.routing import Routing

WIDTH = 16
ROWS = 32


class Block(nn.Module):
    """(rows, WIDTH) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(relu(self.up(self.norm(x))))


class Net(nn.Module):
    """(rows, WIDTH) -> (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.drop, self.output = nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(self.drop(x))


class Tied(nn.Module):
    """Tokens (rows, context) -> logits, by PyTorch's own encoder, with one weight at both ends and a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3)
        self.output = nn.Linear(WIDTH, 50, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.encoder(self.embedding(tokens))))


class Keeping(Net):
    """Keeps an activation of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.repeat(1, 8))
        return super().forward(x)


class Experts(nn.Module):
    """(rows, WIDTH) -> the same: two of four experts for each row. Real logits are a table, so that each expert is
    chosen as often as `shares` say; a simulation sees them as any others."""

    def __init__(self, shares: tuple[float, ...], by_mask: bool) -> None:
        super().__init__()
        self.by_mask, self.router = by_mask, nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        chosen = torch.from_numpy(Routing(shares).chosen(EXPERT_ROWS, 2, 4))
        self.register_buffer("table", nn.functional.one_hot(chosen, 4).sum(1) * 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk((self.router(x) + self.table).softmax(-1), 2)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.by_mask:
                mask = (chosen == i).any(-1)
                weight = (weights * (chosen == i)).sum(-1, keepdim=True)
                found[mask] = found[mask] + weight[mask] * expert(x[mask])
            else:  # as transformers' Mixtral does
                row, place = torch.where(chosen == i)
                found.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return found


EXPERT_ROWS = 1203
"""Enough for a simulation to compute no values of them."""


def _experts(shares: tuple[float, ...], by_mask: bool) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(shares, by_mask), nn.Linear(WIDTH, WIDTH))
    return model, rows(EXPERT_ROWS), loss


masks_uniform, masks_uneven = (partial(_experts, shares, True) for shares in ((), (0.4, 0.1, 0.3, 0.2)))
where_uniform, where_uneven = (partial(_experts, shares, False) for shares in ((), (0.4, 0.1, 0.3, 0.2)))


class Checkpointing(Net):
    """Checkpoints its blocks itself, in either variant."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.output(self.drop(x))


class ByRank(Net):
    """Computes something else on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + (dist.get_rank() if dist.is_initialized() else 0))


class Masking(Net):
    """Goes on with some rows, which depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x[x.mean(-1) > 0]).mean()


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randint(WIDTH, (count,))


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def make() -> tuple[Any, ...]:
    return Net(), rows(), loss


def tied() -> tuple[Any, ...]:
    tokens = torch.randint(50, (4, 12))
    return Tied(), (tokens,), lambda model, tokens: cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def with_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay of the first half alone."""
    half = len(parameters) // 2
    return torch.optim.AdamW([{"params": parameters[:half], "weight_decay": 0.1}, {"params": parameters[half:]}], 1e-3)


def with_optimizer() -> dict[str, Any]:
    return {"model": Net(), "batch": rows(), "loss": loss, "optimizer": with_groups}


def keeping() -> tuple[Any, ...]:
    return Keeping(), rows(), loss


kept_losses: list[Tensor] = []


def remembering() -> tuple[Any, ...]:
    """Four bytes a step."""

    def remembered(model: Any, x: Tensor, y: Tensor) -> Tensor:
        kept_losses.append(loss(model, x, y))
        return kept_losses[-1]

    return Net(), rows(), remembered


def checkpointing() -> tuple[Any, ...]:
    return Checkpointing(False), rows(), loss


def checkpointing_reentrant() -> tuple[Any, ...]:
    x, y = rows()
    return Checkpointing(True), (x.requires_grad_(), y), loss


def by_rank() -> tuple[Any, ...]:
    return ByRank(), rows(), loss


def masking() -> tuple[Any, ...]:
    return Masking(), rows(2000), loss


def with_one_batch() -> tuple[Any, ...]:
    return Net(), (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)), loss


def drawn_by_python() -> tuple[Any, ...]:
    return Net(), (torch.full((ROWS, WIDTH), random.random()), torch.zeros(ROWS, dtype=torch.int64)), loss


def another_optimizer() -> dict[str, Any]:
    return with_optimizer() | {"optimizer": torch.optim.SGD(Net().parameters())}


def no_optimizer() -> dict[str, Any]:
    return with_optimizer() | {"optimizer": lambda parameters: len(parameters)}


def misspelt() -> dict[str, Any]:
    return with_optimizer() | {"optimiser": with_groups}


def in_bfloat16() -> tuple[Any, ...]:
    return Net().bfloat16(), (torch.randn(ROWS, WIDTH, dtype=torch.bfloat16), torch.randint(WIDTH, (ROWS,))), loss


number = 5


def nothing() -> None:
    return


def two() -> tuple[Any, ...]:
    return Net(), rows()


def no_module() -> tuple[Any, ...]:
    return loss, rows(), loss


def no_tuple() -> tuple[Any, ...]:
    return Net(), torch.ones(1), loss


def no_loss() -> tuple[Any, ...]:
    return Net(), rows(), 5


def no_blocks() -> tuple[Any, ...]:
    return Net(), rows(), loss, [Block()]


def without_parameters() -> tuple[Any, ...]:
    return nn.ReLU(), rows(), loss


def vector() -> tuple[Any, ...]:
    return Net(), rows(), lambda model, x, y: model(x).sum(-1)


def python_number() -> tuple[Any, ...]:
    return Net(), rows(), lambda model, x, y: 1.0


def constant() -> tuple[Any, ...]:
    return Net(), rows(), lambda model, x, y: x.sum()


def misshapen() -> tuple[Any, ...]:
    return Net(), (torch.ones(3, 5), torch.zeros(3)), loss


def raising() -> tuple[Any, ...]:
    raise LookupError("two\nlines")


def on_a_gpu() -> tuple[Any, ...]:
    """As scripts for one GPU are written."""
    model = nn.Linear(3, 2).cuda().to("cuda:0")
    model.register_buffer("scale", torch.ones(2, device=torch.device("cuda", 1)))
    return model, (torch.randn(4, 3, device="cpu").to(0),), lambda model, x: (model(x) * model.scale).square().mean()

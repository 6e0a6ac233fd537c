"""An embedding and a cross entropy of which each rank has a part of the vocabulary (Shoeybi et al., "Megatron-LM",
2019)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding

from impl.mesh.decoder import IGNORED
from impl.tensor_parallel.communication import Group


def own_rows(tokens: Tensor, rows: int, first: int) -> tuple[Tensor, Tensor]:
    """The row of each token among this rank's, 0 for others' tokens, and which tokens are its own."""
    own = (tokens >= first) & (tokens < first + rows)
    return torch.where(own, tokens - first, 0), own


def embedded(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows of this rank's part of the embedding, (tokens, dim), and zeros for others' tokens: a summand."""
    rows, own = own_rows(tokens, weight.shape[0], first)
    return embedding(rows, weight).masked_fill(~own[:, None], 0)


class VocabularyLoss(torch.autograd.Function):
    """The sum of the cross entropies of targets (tokens), by logits (tokens, columns) whose first column is number
    `first` of the vocabulary; targets that are IGNORED have none. In float32 12 bytes of a token are all-reduced."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        columns, own = own_rows(targets, logits.shape[1], first)
        picked = (logits.gather(1, columns[:, None]).squeeze(1) - largest).masked_fill(~own, 0)
        exponentials = (logits - largest[:, None]).exp_()
        sums = torch.stack([exponentials.sum(1), picked])
        dist.all_reduce(sums, group=group)
        counted = targets != IGNORED
        shares = exponentials.div_(sums[0, :, None]).masked_fill_(~counted[:, None], 0)
        ctx.save_for_backward(shares, columns, own)
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, columns, own = ctx.saved_tensors
        found = shares * gradient
        found.scatter_add_(1, columns[:, None], (-gradient * own)[:, None])
        return found, None, None, None

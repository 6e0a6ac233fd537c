"""Modules whose parameters have no elements, no dimensions or gaps in memory."""

import torch
from torch import Tensor, nn

from correctness.support.whole_batch import DIM


class Empty(nn.Module):
    """Parameters without elements, alone in a unit and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.layer = nn.Linear(DIM, 0), nn.Linear(DIM, 2 * DIM)
        self.rows = nn.Parameter(torch.rand(0, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.layer(torch.cat([x, self.none(x)], 1)) + self.rows.sum()


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(0.5)), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.layer(x) * self.scale


class Strided(nn.Module):
    """Parameters that are not contiguous: a transposed matrix, and a convolution whose channels come last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.matrix = nn.Linear(DIM, 5), nn.Parameter(torch.rand(2 * DIM, 5).T)
        self.layer.weight = nn.Parameter(torch.rand(DIM, 5).T)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        image = self.convolution(x.view(-1, 2, 1, DIM // 2).expand(-1, -1, 2, -1))  # (rows, 3, 1, 2)
        return self.layer(x).tanh() @ self.matrix + image.mean((1, 2, 3))[:, None]

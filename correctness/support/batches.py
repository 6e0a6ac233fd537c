"""Batches of tokens that families share, and whether a step leaves them as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def packed(rows: int, context: int, random: torch.Generator) -> Tensor:
    """Positions (rows, context) that begin again within each row, as where documents are packed; the first document of
    a row may have begun in another one, so that its positions are of any numbers."""
    begins, positions = torch.randint(context, (rows, 1), generator=random), torch.arange(context).expand(rows, -1)
    offsets = begins * 2 % 5 * context  # no further draw
    return torch.where(positions < begins, positions + offsets, positions - begins)


@contextmanager
def left_as_they_are(batches: Sequence[Any]) -> Iterator[None]:
    """Raise ValueError where the block changes tensors of these batches, which are the caller's, or lets them need a
    gradient."""
    before = copy.deepcopy(batches)
    yield
    for number, (was, now) in enumerate(zip(before, batches, strict=True)):
        for one, other in zip(tree_leaves(was), tree_leaves(now), strict=True):
            if isinstance(one, Tensor) and not (one.equal(other) and one.requires_grad == other.requires_grad):
                raise ValueError(f"the step changed micro-batch {number}, which is the caller's: {one} became {other}")

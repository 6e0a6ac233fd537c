"""The objective of a trainer: a sum over batches, divided by a count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impl.mesh.decoder import token_count, token_losses
from shardmark.api import Loss


@dataclass(frozen=True)
class Objective:
    """A step's loss is the sum of `losses(model, batch)` over all ranks and micro-batches, divided by the sum of
    `count(batch)`."""

    losses: Callable[[Any, Any], Tensor] = token_losses
    count: Callable[[Any], Tensor] = token_count


def mean_of(loss: Loss) -> Objective:
    """The mean over ranks and micro-batches of `loss(model, *batch)`, which is a mean itself."""

    return Objective(lambda model, batch: loss(model, *batch), lambda batch: torch.ones((), dtype=torch.int64))


TOKENS = Objective()
"""The cross entropy of a token: each target of the step counts once."""

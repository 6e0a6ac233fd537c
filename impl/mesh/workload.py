"""One training step on a mesh, of the decoder or of a user's own model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from impl.mesh.cases import SIZES, MeshCase
from impl.mesh.contract import makes_trainer
from impl.mesh.decoder import Decoder
from impl.mesh.objective import mean_of
from impl.mesh.trainer import Named, by_mesh
from impl.training_step.models import made
from shardmark.api import Implementation, Mark, Mesh, NotAsked, OwnModelCase, Unsupported

MAX_NORM = 1.0


class MeshStep:
    """A step of a trainer, with clipping, on this rank's share of the batch."""

    def __init__(self, implementation: Implementation, case: MeshCase | OwnModelCase, device: str) -> None:
        self.backend = dist.get_backend()
        self.batches: list[Any]
        mesh = Mesh.parse(case.mesh)
        on = mesh.device_mesh(torch.device(device).type)
        if isinstance(case, OwnModelCase):
            self.trainer, self.batches = _of_own_model(implementation, case, mesh, on, device)
            return
        vocabulary = SIZES[case.model].vocabulary
        shape = mesh.row_groups * case.batch, case.context
        random = torch.Generator(device).manual_seed(0)  # every rank draws the whole batch
        tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=random, device=device)
        positions = torch.arange(shape[1], device=device).expand(shape)
        share = mesh.share((tokens[:, :-1], positions, tokens[:, 1:]), dist.get_rank())
        self.batches = [tuple(each.clone() for each in share)]
        del tokens

        def model() -> nn.Module:
            torch.manual_seed(0)
            with torch.device(device):
                return Decoder(SIZES[case.model])

        self.trainer = implementation.adapted(model, _adamw, on, max_norm=MAX_NORM)

    def prepare(self) -> None:
        """Nothing to reset: a step frees the last one's gradients."""

    def step(self, mark: Mark) -> None:
        """Forward, backward, communication, clipping and the optimizer."""
        self.trainer.step(self.batches)
        mark("optimizer")


def _adamw(named: Named) -> Optimizer:
    return AdamW(by_mesh([parameter for _, parameter in named]), fused=True)


def _of_own_model(
    implementation: Implementation, case: OwnModelCase, mesh: Mesh, on: Any, device: str
) -> tuple[Any, list[Any]]:
    """The trainer of a user's own model, and its micro-batches, drawn by the rank's group of rows."""
    if makes_trainer(implementation.target) and not implementation.accepts("objective"):
        raise Unsupported("a trainer has a loss of its own: --model is for parallelize(model, mesh)")
    rank = dist.get_rank()
    with torch.device(device):
        torch.manual_seed(mesh.row_group(rank))
        batch: Sequence[Any] = made(case).batch
        torch.manual_seed(0)
        own = made(case)
    trainer = implementation.adapted(
        lambda: own.module,
        lambda named: own.optimizer(by_mesh([parameter for _, parameter in named])),
        on,
        max_norm=math.inf if case.recipe.clip is None else case.recipe.clip,
        objective=mean_of(own.loss),
    )
    return trainer, [own_slices(mesh, batch, rank)] * case.recipe.micro_batches


def own_slices(mesh: Mesh, batch: Sequence[Any], rank: int) -> Sequence[Any]:
    """The rank's slices of a batch of a user's own; NotAsked where it has no second dimension that `cp` divides."""
    parts = mesh.sizes.get("cp", 1)
    if parts == 1:
        return batch
    if not all(isinstance(each, Tensor) and each.ndim > 1 and each.shape[1] % parts == 0 for each in batch):
        raise NotAsked(f"its batch has no second dimension that {parts} slices divide")
    return mesh.slices(batch, rank)

"""A step whose gradients are not finite, on every rank or on the one that has an embedding's row."""

from __future__ import annotations

from functools import partial

import torch

from correctness.mesh.training import (
    Trace,
    batches,
    max_norm_of,
    model_of,
    one_process,
    own_batches,
    train,
    trainer_of,
)
from impl.mesh import Decoder, DecoderSize
from impl.mesh.decoder import IGNORED, Batch
from shardmark.api import Implementation, Mesh

WHERE = ("everywhere", "in_one_row")
"""Where gradients are not finite: in every parameter, or in the row of an embedding alone, which is all that trains."""
BAD = DecoderSize.vocabulary - 1
"""A token whose embedding is NaN."""
EMBEDDING = "tok_embeddings.weight"


def batches_with_bad(where: str, groups: int, step: int) -> list[Batch]:
    """Batches whose last row has that token: nowhere; at its end, with a target or "unseen", without one; or as all of
    a row without targets, so that no other embedding is reached. In the last two the loss is finite."""
    found = [(tokens % BAD, positions, targets.clone()) for tokens, positions, targets in batches(groups, step)]
    tokens, _, targets = found[-1]
    match where:
        case "everywhere":
            tokens[-1, -1], targets[-1, -1] = BAD, 0
        case "unseen":
            tokens[-1, -1], targets[-1, -1] = BAD, IGNORED
        case "in_one_row":
            tokens[-1], targets[-1] = BAD, IGNORED
    return found


def _batches(where: str, groups: int, step: int) -> list[Batch]:
    return batches_with_bad(where if step == 1 else "nowhere", groups, step)


def with_a_bad_embedding(model: Decoder) -> Decoder:
    model.tok_embeddings.weight.data[BAD] = torch.nan
    return model


def _model(where: str, kind: str, device: str) -> Decoder:
    model = with_a_bad_embedding(model_of(kind, device))
    if where == "in_one_row":
        model.requires_grad_(False).tok_embeddings.requires_grad_(True)
    return model


def train_on_rank(implementation: Implementation, mesh: Mesh, where: str, device: str, max_norm: float) -> Trace:
    trainer = trainer_of(implementation, mesh, "plain", device, max_norm, partial(_model, where))
    return _without_bad(train(trainer, partial(own_batches, mesh, device, of=partial(_batches, where)), range(3)))


def in_one_process(where: str, groups: int) -> Trace:
    max_norm = max_norm_of(groups, "plain")
    trainer = one_process("plain", max_norm, partial(_model, where))
    return _without_bad(train(trainer, partial(_batches, where, groups), range(3), max_norm))


def _without_bad(trace: Trace) -> Trace:
    """Leave out the step's loss, norm and gradients, and that embedding."""
    trace.losses[1] = trace.norms[1] = 0.0
    del trace.gradients[1]
    for parameters in trace.parameters.values():
        parameters[EMBEDDING][BAD] = 0
    return trace

"""Steps whose gradients are not finite: NaN on every rank or on the one that has an embedding's row, or infinite."""

from __future__ import annotations

import math
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

WHERE = ("everywhere", "in_one_row", "infinite")
"""Where gradients are not finite: in every parameter; in the row of an embedding alone, which is all that trains; or in
the last matrix of a network, all that trains then, and none is NaN."""
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
        case "infinite":  # one target in all: two might add infinities of both signs
            aim = targets[-1, -1].clamp(min=0)
            for _, _, each in found:
                each.fill_(IGNORED)
            targets[-1, -1] = aim
    return found


def _batches(where: str, groups: int, step: int) -> list[Batch]:
    return batches_with_bad(where if step in _bad_steps(where) else "nowhere", groups, step)


def _bad_steps(where: str) -> range:
    """Weights that are too large are so in every step."""
    return range(3) if where == "infinite" else range(1, 2)


def with_a_bad_embedding(model: Decoder) -> Decoder:
    model.tok_embeddings.weight.data[BAD] = torch.nan
    return model


def _model(where: str, kind: str, device: str) -> Decoder:
    if where == "infinite":
        model = model_of(kind, device).requires_grad_(False)
        network = model.layers[-1].feed_forward
        network.w2.weight.data.zero_()
        network.w2.requires_grad_(True)
        for weight, factor in ((network.w1.weight, 1e100), (network.w3.weight, 1e100), (model.output.weight, 1e150)):
            weight.data.mul_(factor)
        return model
    model = with_a_bad_embedding(model_of(kind, device))
    if where == "in_one_row":
        model.requires_grad_(False).tok_embeddings.requires_grad_(True)
    return model


def train_on_rank(implementation: Implementation, mesh: Mesh, where: str, device: str, max_norm: float) -> Trace:
    trainer = trainer_of(implementation, mesh, "plain", device, max_norm, partial(_model, where))
    of_step = partial(own_batches, mesh, device, of=partial(_batches, where))
    return _without_bad(where, train(trainer, of_step, range(3)))


def in_one_process(where: str, groups: int) -> Trace:
    max_norm = max_norm_of(groups, "plain")
    trainer = one_process("plain", max_norm, partial(_model, where))
    trace = train(trainer, partial(_batches, where, groups), range(3), max_norm)
    assert where != "infinite" or trace.norms == [math.inf] * 3
    return _without_bad(where, trace)


def _without_bad(where: str, trace: Trace) -> Trace:
    """Leave out the losses, norms and gradients of steps that are not finite, and that embedding."""
    for step in _bad_steps(where):
        trace.losses[step] = trace.norms[step] = 0.0
        del trace.gradients[step]
    for parameters in trace.parameters.values():
        parameters[EMBEDDING][BAD] = 0
    return trace

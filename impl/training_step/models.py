"""The models that training steps train: a language model on random tokens, or a user's own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.precision import PRECISIONS, Precision
from impl.training_step import eager
from impl.training_step.cases import TrainingStepCase
from shardmark.api import (
    Implementation,
    Loss,
    Made,
    OwnModelCase,
    Unsupported,
    make,
    named_optimizer,
    resized,
    resolve,
)


def made(case: TrainingStepCase | OwnModelCase, casts: bool = False) -> Made:
    """Make the case's model, batch, loss and optimizer on the default device. The loss is under autocast if the case
    asks for a compute dtype, unless the strategy `casts` to it itself."""
    if isinstance(case, OwnModelCase):
        own = make(case.model, torch.get_default_device().type)
        for dim, size in enumerate((case.batch, case.context)):
            if size is not None:
                own.batch = resized(own.batch, dim, size)
        if case.recipe.optimizer is not None:
            own.optimizer = named_optimizer(case.recipe.optimizer)
        if case.recipe.compute_dtype and not casts:
            own.loss = _under_autocast(own.loss, PRECISIONS[case.recipe.compute_dtype])
        if case.checkpointed:
            checkpointed(resolve("checkpointing", "full"), own, case)
        return own
    model, loss = language_model(case), next_token_loss
    if case.dtype != "float32" and not casts:
        loss = _under_autocast(eager.next_token_loss, PRECISIONS[case.dtype])
    return Made(model, random_tokens(case), loss, model.blocks)


def _under_autocast(loss: Loss, precision: Precision) -> Loss:
    """The model and its loss under autocast to that precision's dtype."""

    def autocast(model: nn.Module, *batch: Any) -> Tensor:
        with precision.autocast(next(model.parameters()).device.type):
            return loss(model, *batch)

    return autocast


def checkpointed(implementation: Implementation, made: Made, case: Any) -> nn.Module:
    """Apply the policy to the module; Unsupported if it has no blocks, or checkpoints itself. A user's own model names
    them `blocks`."""
    if getattr(case, "checkpoints", False):
        raise Unsupported(
            f"{type(made.module).__name__} calls torch.utils.checkpoint itself, and is not checkpointed twice"
        )
    if not len(made.blocks):
        kind = type(made.module).__name__
        raise Unsupported(f"{kind} has no blocks: no ModuleList or Sequential with several of one class")
    named = getattr(made.module, "blocks", None) is made.blocks
    options = {"length": case.length} if hasattr(case, "length") else {}
    implementation.adapted(made.module if named else nn.ModuleDict({"blocks": made.blocks}), **options)
    return made.module


def language_model(case: TrainingStepCase) -> Transformer | MLPLanguageModel:
    """A new model of the case's size, on the default device."""
    if case.model in MLP_SIZES:
        return MLPLanguageModel(MLP_SIZES[case.model])
    attention = resolve("attention", case.attention).adapted
    return Transformer(SIZES[case.model], context_length=case.context, attention=attention)


def random_tokens(case: TrainingStepCase) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (batch, context) each."""
    vocab = (MLP_SIZES if case.model in MLP_SIZES else SIZES)[case.model].vocab
    tokens, targets = (torch.randint(vocab, (case.batch, case.context)) for _ in range(2))
    return tokens, targets


def next_token_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the targets. The logits are freed at its end: autograd saves what backward needs."""
    logits = model(tokens)  # (batch, context, vocab)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())

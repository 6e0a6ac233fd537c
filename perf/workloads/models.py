"""What training steps train: a language model on random tokens, or a user's own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.model.own import OwnModelCase
from impl.training_step.cases import TrainingStepCase
from shardmark import registry
from shardmark.ownmodel import Made, make


def made(case: TrainingStepCase | OwnModelCase) -> Made:
    """A new model, batch and loss of the case, on the default device."""
    if isinstance(case, OwnModelCase):
        return make(case.model, torch.get_default_device().type)
    model = language_model(case)
    return Made(model, random_tokens(case), next_token_loss, model.blocks)


def language_model(case: TrainingStepCase) -> Transformer | MLPLanguageModel:
    """A new model of the case's size, on the default device."""
    if case.model in MLP_SIZES:
        return MLPLanguageModel(MLP_SIZES[case.model])
    attention = registry.resolve("attention", case.attention).adapted
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

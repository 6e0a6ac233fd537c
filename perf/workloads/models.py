"""What training steps train: a language model on random tokens, or a user's own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map_only

from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.model.own import OwnModelCase
from impl.training_step.cases import TrainingStepCase
from shardmark import registry
from shardmark.ownmodel import Made, make
from shardmark.registry import Implementation, Unsupported


def made(case: TrainingStepCase | OwnModelCase) -> Made:
    """A new model, batch and loss of the case, on the default device."""
    if isinstance(case, OwnModelCase):
        own = make(case.model, torch.get_default_device().type)
        if case.batch is not None:
            own.batch = with_rows(own.batch, case.batch)
        if case.checkpointed:
            checkpointed(registry.resolve("checkpointing", "full"), own)
        return own
    model = language_model(case)
    return Made(model, random_tokens(case), next_token_loss, model.blocks)


def rows_of(batch: tuple[Any, ...]) -> int:
    """The length of the first dimension of all of its tensors; Unsupported where they differ."""
    lengths = {tensor.size(0) for tensor in tree_leaves(batch) if isinstance(tensor, Tensor) and tensor.dim()}
    if len(lengths) != 1:
        raise Unsupported(f"its batch has no one length: the first dimensions of its tensors are {sorted(lengths)}")
    return lengths.pop()


def with_rows(batch: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """The batch with so many rows: the first ones, or all of them again and again."""
    before = rows_of(batch)

    def resized(tensor: Tensor) -> Tensor:
        copies = [-(-rows // before)] + [1] * (tensor.dim() - 1)
        return tensor.repeat(copies)[:rows].clone() if tensor.dim() else tensor

    return tree_map_only(Tensor, resized, batch)


def checkpointed(implementation: Implementation, made: Made) -> nn.Module:
    """The module, under the policy; Unsupported where it has no blocks. A policy finds a user's own as `blocks`."""
    if not len(made.blocks):
        kind = type(made.module).__name__
        raise Unsupported(f"{kind} has no blocks: no ModuleList or Sequential with several of one class")
    named = getattr(made.module, "blocks", None) is made.blocks
    implementation.adapted(made.module if named else nn.ModuleDict({"blocks": made.blocks}))
    return made.module


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

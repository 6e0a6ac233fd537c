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
from shardmark.ownmodel import Loss, Made, make
from shardmark.registry import Implementation, Unsupported


def made(case: TrainingStepCase | OwnModelCase) -> Made:
    """A new model, batch and loss of the case, on the default device."""
    if isinstance(case, OwnModelCase):
        own = make(case.model, torch.get_default_device().type)
        for dim, size in enumerate((case.batch, case.context)):
            if size is not None:
                own.batch = resized(own.batch, dim, size)
        if case.autocast:
            own.loss = _under_autocast(own.loss)
        if case.checkpointed:
            checkpointed(registry.resolve("checkpointing", "full"), own)
        return own
    model = language_model(case)
    return Made(model, random_tokens(case), next_token_loss, model.blocks)


def _under_autocast(loss: Loss) -> Loss:
    """The same loss of the same model, both under autocast to bfloat16."""

    def autocast(model: nn.Module, *batch: Any) -> Tensor:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            return loss(model, *batch)

    return autocast


def size_of(batch: tuple[Any, ...], dim: int) -> int:
    """The length of that dimension of all its tensors that have it; Unsupported where they differ."""
    lengths = {tensor.size(dim) for tensor in tree_leaves(batch) if isinstance(tensor, Tensor) and tensor.dim() > dim}
    if len(lengths) != 1:
        which = ("first", "second")[dim]
        raise Unsupported(f"its batch has no one length: the {which} dimensions of its tensors are {sorted(lengths)}")
    return lengths.pop()


def resized(batch: tuple[Any, ...], dim: int, size: int) -> tuple[Any, ...]:
    """The batch, so long in that dimension: the first ones there, or all of them again and again."""
    before = size_of(batch, dim)

    def of(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim:
            return tensor
        copies = [-(-size // before) if each == dim else 1 for each in range(tensor.dim())]
        return tensor.repeat(copies).narrow(dim, 0, size).clone()

    return tree_map_only(Tensor, of, batch)


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

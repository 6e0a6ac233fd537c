"""Training steps of our models in PyTorch alone. Formulas add the bytes of a technique to those of a plain step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from impl.model.mlp import MLP_SIZES, MLPLanguageModel, MLPSize, square_linears
from impl.model.sizes import SIZES, TransformerSize
from impl.model.transformer import Transformer
from shardmark.api import PlainStep, resolve

if TYPE_CHECKING:
    from impl.fsdp.cases import NineLinearsCase
    from impl.training_step.cases import TrainingStepCase

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PlainLanguageModel:
    """One AdamW step, fused and so without temporaries, of a language model of that size on random tokens."""

    size: TransformerSize | MLPSize
    batch: int
    context: int
    dtype: str = "float32"
    """Dtype of products under autocast (parameters are float32); without `autocast`, of all but the MLP's loss."""
    attention: str = "sdpa"
    autocast: bool = True
    checkpointed: bool = False
    """Whether PyTorch's own checkpointing is around each block."""
    autocast_loss: bool = False
    """Whether autocast chooses the dtypes of the loss, whose logits are cast to float32 otherwise."""

    @classmethod
    def of(cls, case: TrainingStepCase, *, autocast: bool = True, checkpointed: bool = False) -> PlainLanguageModel:
        """The step of that case, on one device."""
        size = MLP_SIZES[case.model] if case.model in MLP_SIZES else SIZES[case.model]
        inside = getattr(case, "autocast_loss", False)
        return cls(size, case.batch, case.context, case.dtype, case.attention, autocast, checkpointed, inside)

    def make(self) -> PlainStep:
        model: Transformer | MLPLanguageModel
        if isinstance(self.size, MLPSize):
            model = MLPLanguageModel(self.size)
        else:
            attention = resolve("attention", self.attention).adapted
            model = Transformer(self.size, context_length=self.context, attention=attention)
        half = HALVES.get(self.dtype)
        if half is not None and not self.autocast:
            for parameter in model.parameters():  # RoPE's tables stay float32
                parameter.data = parameter.data.to(half)
        if self.checkpointed:
            for block in model.blocks:
                run = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
                block.forward = run
        tokens, targets = (torch.randint(self.size.vocab, (self.batch, self.context)) for _ in range(2))

        def loss() -> Tensor:
            with torch.autocast("cpu", half, enabled=half is not None and self.autocast):
                logits = model(tokens).flatten(0, 1)  # (tokens, vocab)
                if not self.autocast_loss and (self.autocast or isinstance(self.size, MLPSize)):
                    logits = logits.float()
                return cross_entropy(logits, targets.flatten())

        return PlainStep(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


@dataclass(frozen=True)
class PlainLinears:
    """One step of SGD, which has no state, of an MLP of square linears with the mean squared error."""

    width: int
    batch: int
    linears: int

    @classmethod
    def of(cls, case: NineLinearsCase) -> PlainLinears:
        """The step of that case, on one device."""
        return cls(case.width, case.batch, case.linears)

    def make(self) -> PlainStep:
        model = square_linears(self.width, self.linears)
        inputs, targets = (torch.randn(self.batch, self.width) for _ in range(2))
        kept: list[Tensor] = []  # the output lives as long as the step

        def loss() -> Tensor:
            kept[:] = [model(inputs)]
            return mse_loss(kept[0], targets)

        return PlainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01))

"""One training step of the tiny language model, for tests that profile or meter it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl.attention import eager_attention
from impl.model import SIZES, Transformer
from shardmark.api.workload import Mark

TINY = SIZES["tiny"]


class TrainingStep:
    """One AdamW step of the tiny transformer."""

    backend = "none"

    def __init__(self, attention: Any = eager_attention, batch: int = 2, context: int = 32) -> None:
        self.model = Transformer(TINY, context_length=context, attention=attention)
        self.tokens, self.targets = (torch.randint(TINY.vocab, (batch, context)) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def prepare(self) -> None:
        self.optimizer.zero_grad()
        self.loss: Tensor | None = None

    def step(self, mark: Mark) -> None:
        logits = self.model(self.tokens)
        self.loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        del logits
        mark("forward")
        self.loss.backward()
        mark("backward")
        self.optimizer.step()
        mark("optimizer")

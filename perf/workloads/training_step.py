"""One training step of a language model on one device, and the variants that questions about it measure."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.model import SIZES, Transformer
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.precision import PRECISIONS
from impl.training_step.cases import TrainingStepCase
from shardmark import registry
from shardmark.plan import Mark
from shardmark.registry import Implementation

CONTEXTS = (128, 256, 512, 1024)
MODELS = ("small", "medium", "large", "xl", "2.7b")
DTYPES = ("float32", "bfloat16", "float16")


class LanguageModelStep:
    """One AdamW step of a language model on random tokens, or the part of it that the case names."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        self.backend = implementation.name
        self.case = case
        precision = PRECISIONS[case.dtype]
        with torch.device(device):
            self.model = _language_model(case).to(precision.parameter)
            shape = case.batch, case.context
            self.tokens, self.targets = (torch.randint(self.model.size.vocab, shape) for _ in range(2))
        # Fused, so that the optimizer itself needs no temporaries.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.training_step = implementation.adapted(self.model, self.optimizer, precision=precision)
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Free the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        if self.case.mode == "step":
            self.training_step(self.tokens, self.targets, mark)
            return
        self.loss = self.training_step.forward(self.tokens, self.targets)
        mark("forward")
        if self.case.mode == "forward_backward":
            self.training_step.backward(self.loss)
            mark("backward")

    def kinds(self) -> dict[str, list[Tensor]]:
        """The live tensors by kind."""
        parameters = list(self.model.parameters())
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": [value for value in state if isinstance(value, Tensor)],
        }


def _language_model(case: TrainingStepCase) -> Transformer | MLPLanguageModel:
    if case.model in MLP_SIZES:
        return MLPLanguageModel(MLP_SIZES[case.model])
    attention = registry.resolve("attention", case.attention).adapted
    return Transformer(SIZES[case.model], context_length=case.context, attention=attention)


class CheckpointedStep(LanguageModelStep):
    """The eager step of a model under a checkpointing policy."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        super().__init__(registry.resolve("training_step", "eager"), case, device)
        implementation.adapted(self.model)
        self.backend = implementation.name

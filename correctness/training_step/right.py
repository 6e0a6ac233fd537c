"""Right training steps that work in unusual ways: the tests must accept them."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss
from torch.optim import Optimizer

from correctness.support.planting import right
from impl.precision import FLOAT32, Precision
from impl.training_step import EagerStep

Mark = Callable[[str], None]


@right("nothing of ours in it")
class ByHand:
    """Uses nothing of ours: `autograd.grad`, its own loss scale, and the loss by another formula."""

    scale = 2.0**10

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        if any(p.dtype != precision.parameter for p in model.parameters() if p.requires_grad):
            raise ValueError("wrong dtype")
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.scaled = precision.compute == torch.float16

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if ((targets < 0) & (targets != -100)).any():
            raise ValueError("a negative target")
        with self.precision.autocast(tokens.device.type):
            logits = self.model(tokens)
        if targets.max() >= logits.shape[-1]:
            raise ValueError("a target beyond the vocabulary")
        return nll_loss(log_softmax(logits.float(), -1).movedim(-1, 1), targets)

    def backward(self, loss: Tensor) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        scale = self.scale if self.scaled else 1.0
        for p, grad in zip(parameters, torch.autograd.grad(loss * scale, parameters, allow_unused=True), strict=True):
            if grad is not None:
                p.grad = grad / scale if p.grad is None else p.grad + grad / scale

    def update(self) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.scaled and not all(bool(grad.isfinite().all()) for grad in grads):
            self.scale /= 4
            warnings.warn("overflow", RuntimeWarning, stacklevel=2)
            return
        self.optimizer.step()

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        loss = self.forward(tokens, targets)
        mark("forward")
        self.backward(loss)
        mark("backward")
        self.update()
        mark("optimizer")
        return loss.detach()


@right("marks one part, the step")
class OnePart(ByHand):
    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        loss = super().__call__(tokens, targets)
        mark("step")
        return loss


@right("a token at a time through the loss")
class LossInChunks(EagerStep):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            logits = self.model(tokens).flatten(0, 1)
        if ((targets < 0) & (targets != -100)).any() or targets.max() >= logits.shape[-1]:
            raise ValueError("a target that is none")
        losses = [
            nll_loss(log_softmax(x.float(), -1), y, reduction="sum")
            for x, y in zip(logits, targets.flatten(), strict=True)
        ]
        return torch.stack(losses).sum() / (targets != -100).sum()


@right("an optimizer that unscales gradients itself gets them scaled; they are unscaled once it has stepped")
class LeavesUnscaling(EagerStep):
    def update(self) -> None:
        scale, scaled = self.scaler.get_scale(), self._scaled
        unscales = scaled and getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if not (unscales and self._gradients()):
            super().update()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._scaled = False
        torch._foreach_mul_(self._gradients(), 1 / scale)
        if self.scaler.get_scale() < scale:
            warnings.warn("overflow", RuntimeWarning, stacklevel=2)


@right("a function that makes it")
def made(model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> EagerStep:
    return EagerStep(model, optimizer, precision=precision)

"""Planted defects that show only in some order of events, with some model, or at some loss scale."""

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from correctness.support.planting import defect
from impl.training_step import EagerStep


@defect(cause="numerics", caught_by="test_the_loss_has_float32s_accuracy")
class LossInTheLogitsDtype(EagerStep):
    """With bfloat16 parameters there is no autocast to make the loss float32."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            return cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()).float()


@defect(cause="numerics", caught_by="test_the_loss_scale_falls_until_gradients_fit")
class ScalesFromOneUp(EagerStep):
    """keras-team/tf-keras#644: the loss scale does not fall below 1."""

    def update(self) -> None:
        super().update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            self.scaler.update(1.0)


@defect(cause="errors", caught_by="test_a_float16_step_that_overflows_is_skipped_with_a_warning")
class SkippedIfNotCalled(EagerStep):
    """huggingface/accelerate#4242: a step counts as skipped if the scaler has not called the optimizer's, which it
    does call where the optimizer looks for overflows itself."""

    def update(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().update()
        for each in caught:
            if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
                warnings.warn(str(each.message), each.category, stacklevel=2)


@defect(cause="numerics", caught_by="test_the_loss_scale_falls_until_gradients_fit")
class EndsAtASmallScale(EagerStep):
    """facebookresearch/fairseq#1529: a loss scale of 0.0001 ends training, though gradients need a smaller one."""

    def update(self) -> None:
        super().update()
        if self.scaler.is_enabled() and self.scaler.get_scale() <= 1e-4:
            raise FloatingPointError("the smallest loss scale is reached")


@defect(cause="gradients", caught_by="test_gradients_are_of_the_losss_own_dropout")
class RecomputesWithOtherDropout(EagerStep):
    """allenai/OLMo-core#828: recomputes forward without its random state, so that other elements are dropped."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            logits: Any = checkpoint(self.model, tokens, use_reentrant=False, preserve_rng_state=False)
            return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Recomputed(torch.autograd.Function):
    """Saves the random state, and recomputes the loss from it in backward."""

    @staticmethod
    def forward(ctx: Any, step: Any, tokens: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        ctx.given, ctx.random = (step, tokens, targets, parameters), torch.get_rng_state()
        return EagerStep.forward(step, tokens, targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        step, tokens, targets, parameters = ctx.given
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            loss = EagerStep.forward(step, tokens, targets)
        return None, None, None, *torch.autograd.grad(loss, parameters, grad)


@defect(cause="random numbers", caught_by="test_gradients_are_of_the_losss_own_dropout")
class LeavesForwardsRandomState(EagerStep):
    """pytorch/pytorch#14253: recomputes with forward's random state, and goes on from it: what the caller draws next
    are forward's numbers again."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return _Recomputed.apply(self, tokens, targets, *self.model.parameters())


@defect(cause="two calls", caught_by="float16")
class ScalesInForward(EagerStep):
    """Scales the loss in forward; a skipped update may halve the scale before its backward."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        loss.scale_then = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        return loss

    def backward(self, loss: Tensor) -> None:
        now = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        super().backward(loss * (getattr(loss, "scale_then", now) / now))


@defect(cause="state", caught_by="thawed")
class TrainsWhatWasTrainableAtFirst(EagerStep):
    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.frozen_at_first = [p for p in model.parameters() if not p.requires_grad]

    def backward(self, loss: Tensor) -> None:
        before = [p.grad for p in self.frozen_at_first]
        super().backward(loss)
        for p, grad in zip(self.frozen_at_first, before, strict=True):
            p.grad = grad


@defect(cause="shapes", caught_by="test_any_history")
class PadsTheContext(EagerStep):
    """huggingface/transformers#28505: pads to a multiple of 8 with token 0, which a model sees that attends to its
    whole context."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        more = -tokens.shape[1] % 8
        return super().forward(pad(tokens, (0, more)), pad(targets, (0, more), value=-100))


@defect(cause="shapes", caught_by="test_orders_that_trainings_have")
class ReadsTargetsAsIfContiguous(EagerStep):
    """unslothai/unsloth#10713, pytorch/pytorch#72120: reads targets as if they were contiguous."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets.as_strided(targets.shape, (targets.shape[1], 1)))


@defect(cause="shapes", caught_by="test_any_history")
class ReadsLogitsAsIfContiguous(EagerStep):
    """NVIDIA/TransformerEngine#2734: reads a transposed model's logits row after row, as they lie in memory."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            logits = self.model(tokens)
            rows = logits.as_strided(logits.shape, (logits[0].numel(), logits.shape[-1], 1)).flatten(0, 1)
            return cross_entropy(rows.float(), targets.flatten())


@defect(cause="state", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class LossStaysScaled(EagerStep):
    """fastai/fastai#3048: the loss is scaled in place, and while gradients accumulate only the last one is unscaled."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.scaler.is_enabled():
            self.last = loss.detach(), self.scaler.get_scale()
            self.last[0].mul_(self.last[1])

    def update(self) -> None:
        super().update()
        if last := self.__dict__.pop("last", None):
            last[0].div_(last[1])


@defect(cause="state", caught_by="test_a_float16_step_that_overflows_is_skipped_with_a_warning")
class UnscalesItsLossByTheNextScale(EagerStep):
    """facebookresearch/fairchem#617: divides the scaled loss by the scale after the update: an overflow halves it."""

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Any = lambda part: None) -> Tensor:
        before = self.scaler.get_scale()
        loss = super().__call__(tokens, targets, mark)
        return loss * before / self.scaler.get_scale()


@defect(cause="state", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class OverwritesWhatTheModelHad(EagerStep):
    """NVIDIA/Megatron-LM#6965: the first backward of a new step writes gradients, and does not add to those there."""

    first = True

    def backward(self, loss: Tensor) -> None:
        if self.first:
            self.optimizer.zero_grad()
        self.first = False
        super().backward(loss)


@defect(cause="gradients", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class BeginsWithoutGradients(EagerStep):
    """Making the step clears the gradients that are there, as after a warm-up that leaves some."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        optimizer.zero_grad()


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class WarmsUp(EagerStep):
    """LibreYOLO/libreyolo#671: the first batch of each shape goes through the model once more, as before a capture:
    losses and gradients are right, and what a batch norm tracks is not."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if tokens.shape not in self.__dict__.setdefault("warm", set()):
            self.warm.add(tokens.shape)
            super().forward(tokens, targets)
        return super().forward(tokens, targets)


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class CopiesWeightsByVersion(EagerStep):
    """Computes with copies of the weights that are made anew where their version is another: it is not after
    `.data =`."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        copies, used = self.__dict__.setdefault("copies", {}), {}
        for name, p in self.model.named_parameters():
            if copies.get(name, (None,))[0] != p._version:
                copies[name] = p._version, p.detach().clone()
            used[name] = p + (copies[name][1] - p).detach()
        model: Any = partial(functional_call, self.model, used, tie_weights=False)
        with self.precision.autocast(self.device):
            return self._loss(model, tokens, targets)


@defect(cause="gradients", caught_by="test_orders_that_trainings_have")
class StepsOnItsOwnGradients(EagerStep):
    """Steps on the gradients' memory as backward left it, as on views of one buffer: a caller who gives a parameter
    another gradient changes none."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.own = {p: p.grad for p in self.model.parameters()}

    def update(self) -> None:
        for p, grad in self.__dict__.get("own", {}).items():
            p.grad = None if p.grad is None else grad
        super().update()


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class CallsTheModelAsAFunction(EagerStep):
    """The model is a function of its parameters and buffers: a buffer that it replaces is put back."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model: Any = partial(functional_call, self.model, dict(self.model.named_buffers()))
        with self.precision.autocast(self.device):
            return self._loss(model, tokens, targets)


@defect(cause="random numbers", caught_by="test_gradients_are_of_the_losss_own_dropout")
class TriesACopy(EagerStep):
    """The first forward runs a copy of the model too, to learn its shapes: that draws random numbers."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not self.__dict__.setdefault("tried", False):
            self.tried = True
            with torch.no_grad(), self.precision.autocast(self.device):
                copy.deepcopy(self.model)(tokens)
        return super().forward(tokens, targets)


@defect(cause="errors", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class FreezesWithoutFinally(EagerStep):
    """A forward without autograd freezes the parameters, and thaws them if it raises no error."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        needing = [p for p in self.model.parameters() if p.requires_grad and not torch.is_grad_enabled()]
        for p in needing:
            p.requires_grad_(False)
        loss = super().forward(tokens, targets)
        for p in needing:
            p.requires_grad_(True)
        return loss


@defect(cause="numerics", caught_by="test_a_gradient_that_is_not_finite_is_stepped_on")
class SkipsWhatIsNotFinite(EagerStep):
    """Skips a step whose gradients are not finite in any precision, as float16 alone does."""

    def update(self) -> None:
        if self.scaler.is_enabled() or all(bool(grad.isfinite().all()) for grad in self._gradients()):
            super().update()

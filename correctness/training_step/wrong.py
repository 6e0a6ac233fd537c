"""Planted defects: training steps with one mistake each."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from correctness.support.planting import defect
from impl.precision import FLOAT32, Precision
from impl.training_step import EagerStep

Mark = Callable[[str], None]


class ByLogits(EagerStep):
    """Base of defects in how the logits are made or used."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return self.loss(self.model(tokens).float(), targets)

    def autocast(self) -> Any:
        return self.precision.autocast(self.device)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


@defect(cause="options", caught_by="test_products_are_in_the_precisions_dtype")
class ForgetsThePrecision(ByLogits):
    def autocast(self) -> Any:
        return torch.autocast(self.device, enabled=False)


@defect(cause="options", caught_by="test_losses_gradients_and_parameters")
class AlwaysBfloat16(ByLogits):
    def autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16)


@defect(cause="options", caught_by="test_products_are_in_the_precisions_dtype")
class Bfloat16ForFloat16(ByLogits):
    def autocast(self) -> Any:
        half = self.precision.compute != torch.float32
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=half)


@defect(cause="masks", caught_by="test_ignored_targets_count_in_no_mean")
class MeanOverEveryToken(ByLogits):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()


@defect(cause="masks", caught_by="test_ignored_targets_count_in_no_mean")
class MeanOfSequences(ByLogits):
    """meta-pytorch/torchtune#1875: averages the means of sequences, which have other numbers of targets."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([cross_entropy(x, y) for x, y in zip(logits, targets, strict=True)]).mean()


@defect(cause="masks", caught_by="test_ignored_targets_count_in_no_mean")
class IgnoredIsTokenZero(ByLogits):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets.clamp(min=0))


@defect(cause="masks", caught_by="test_where_all_targets_are_ignored")
class ZeroWhereNothingCounts(ByLogits):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets).nan_to_num()


@defect(cause="numerics", caught_by="test_the_loss_is_a_float32_scalar")
class LossInHalf(ByLogits):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets).to(self.precision.compute)


@defect(cause="gradients", caught_by="test_orders_that_trainings_have")
class ZeroesFirst(EagerStep):
    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        self.optimizer.zero_grad()
        return super().__call__(tokens, targets, mark)


@defect(cause="gradients", caught_by="test_orders_that_trainings_have")
class ReplacesGradients(EagerStep):
    def backward(self, loss: Tensor) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for p, grad in zip(parameters, torch.autograd.grad(self.scaler.scale(loss), parameters), strict=True):
            p.grad = grad


@defect(cause="gradients", caught_by="test_large_gradients_are_not_clipped")
class Clips(EagerStep):
    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().update()


@defect(cause="numerics", caught_by="test_float16_takes_the_step_of_unscaled_gradients")
class NeverUnscales(EagerStep):
    def update(self) -> None:
        self.optimizer.step()


@defect(cause="errors", caught_by="test_a_float16_step_that_overflows_is_skipped_with_a_warning")
class SkipsInSilence(EagerStep):
    def update(self) -> None:
        with warnings.catch_warnings(action="ignore"):
            super().update()


@defect(cause="numerics", caught_by="test_a_float16_step_that_overflows_is_skipped_with_a_warning")
class StepsDespiteOverflow(EagerStep):
    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if any(p.grad is not None and not p.grad.isfinite().all() for p in self.model.parameters()):
            warnings.warn("gradients overflowed", RuntimeWarning, stacklevel=2)
        self.optimizer.step()
        self.scaler.update()


@defect(cause="numerics", caught_by="test_the_loss_scale_falls_until_gradients_fit")
class ScaleStays(EagerStep):
    def update(self) -> None:
        scale = self.scaler.get_scale()
        super().update()
        self.scaler.update(scale)


@defect(cause="numerics", caught_by="test_gradients_too_small_for_float16_arrive")
class ScalesNothing(EagerStep):
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        self.scaler = torch.amp.GradScaler(self.device, enabled=False)


@defect(cause="memory", caught_by="test_the_loss_is_a_float32_scalar")
class KeepsTheGraph(EagerStep):
    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        loss = self.forward(tokens, targets)
        self.backward(loss)
        self.update()
        for part in ("forward", "backward", "optimizer"):
            mark(part)
        return loss


@defect(cause="errors", caught_by="test_parts_mark_their_end")
class MarksNothing(EagerStep):
    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        return super().__call__(tokens, targets)


@defect(cause="errors", caught_by="test_parts_mark_their_end")
class MarksBeforeItIsDone(EagerStep):
    def __call__(self, tokens: Tensor, targets: Tensor, mark: Mark = lambda part: None) -> Tensor:
        loss = self.forward(tokens, targets)
        for part in ("forward", "backward", "optimizer"):
            mark(part)
        self.backward(loss)
        self.update()
        return loss.detach()


@defect(cause="two calls", caught_by="test_orders_that_trainings_have")
class RemembersOneLoss(EagerStep):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.last = super().forward(tokens, targets)
        return self.last

    def backward(self, loss: Tensor) -> None:
        super().backward(self.last)


@defect(cause="shapes", caught_by="test_orders_that_trainings_have")
class KeepsItsInputs(EagerStep):
    """Copies each batch into the first batch's memory, as for a CUDA graph."""

    inputs: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.inputs is None:
            self.inputs = tokens.clone(), targets.clone()
        for kept, new in zip(self.inputs, (tokens, targets), strict=True):
            rows, columns = (min(a, b) for a, b in zip(kept.shape, new.shape, strict=True))
            kept[:rows, :columns] = new[:rows, :columns]
        return super().forward(*self.inputs)


@defect(cause="options", caught_by="test_orders_that_trainings_have")
class StepsTwice(EagerStep):
    def update(self) -> None:
        super().update()
        self.optimizer.step()


@defect(cause="options", caught_by="test_orders_that_trainings_have")
class RateOfTheStart(EagerStep):
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def update(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        super().update()


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class Evaluates(EagerStep):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.eval()
        return super().forward(tokens, targets)


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class Trains(EagerStep):
    """open-mmlab/OpenPCDet#812: puts the model into training mode at each step, frozen parts too."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.train()
        return super().forward(tokens, targets)


@defect(cause="state", caught_by="test_parameters_keep_their_dtype")
class ConvertsTheModel(EagerStep):
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        model.to(precision.compute)


@defect(cause="errors", caught_by="test_parameters_of_another_precision_are_refused")
class TakesAnyParameters(EagerStep):
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        dtype = next(model.parameters()).dtype
        super().__init__(
            model, optimizer, precision=precision if dtype == precision.parameter else Precision(dtype, dtype)
        )


@defect(cause="errors", caught_by="test_wrong_targets_are_refused")
class WrapsTargets(ByLogits):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, torch.where(targets == -100, targets, targets % logits.shape[-1]))


@defect(cause="gradients", caught_by="test_frozen_parameters_stay")
class ThawsEverything(EagerStep):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.requires_grad_(True)
        return super().forward(tokens, targets)


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class RestoresTheRootsMode(EagerStep):
    """Sets each submodule to the root's mode, whatever its own was."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.train(self.model.training)
        return super().forward(tokens, targets)


@defect(cause="memory", caught_by="test_no_activations_are_left_once_losses_are_freed")
class LogsTheLoss(EagerStep):
    """pnnl/neuromancer#292: keeps the last loss for a log, and with it the graph."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.last = super().forward(tokens, targets)
        return self.last


@defect(cause="masks", caught_by="test_an_update_after_ignored_targets_is_one_step")
class SkipsWhereTheLossIsNaN(EagerStep):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.bad = bool(loss.isnan())

    def update(self) -> None:
        if not self.bad:
            super().update()


@defect(cause="gradients", caught_by="test_orders_that_trainings_have")
class AddsScaledToUnscaled(EagerStep):
    """Adds scaled gradients to the unscaled ones that an update left."""

    def backward(self, loss: Tensor) -> None:
        self._scaled = True
        super().backward(loss)

"""Planted defects: training steps that are wrong as public trackers report."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from correctness.support.planting import CHECK, defect
from correctness.training_step.wrong import ByLogits
from impl.precision import FLOAT32, Precision
from impl.training_step import EagerStep
from impl.training_step.eager import next_token_loss
from shardmark.api import Unsupported

HISTORIES = "test_any_history"
OVERFLOW = "test_a_float16_step_that_overflows_is_skipped_with_a_warning"


@defect(cause="masks", caught_by="test_the_mean_is_over_all_targets_of_a_large_batch")
class MeanOfMicroBatchesAboveEightRows(ByLogits):
    """huggingface/transformers#24725: averages the means of micro-batches, which have other numbers of targets."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        means = [super(type(self), self).loss(x, y) for x, y in zip(logits.split(8), targets.split(8), strict=True)]
        return torch.stack(means).mean()


@defect(cause="numerics", caught_by="test_targets_are_counted_exactly")
class CountsTargetsInHalfPrecision(ByLogits):
    """chaidiscovery/chai-lab#425: the count of targets is of the logits' dtype, and bfloat16 rounds it above 256."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (targets != -100).to(self.precision.compute).sum()


@defect(cause="numerics", caught_by="by_default_bfloat16")
class CountsTargetsInTheDefaultDtype(ByLogits):
    """The count of targets is of the job's default dtype, which a job that makes its model in bfloat16 has set."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return total / torch.tensor(float((targets != -100).sum()))


@defect(cause="masks", caught_by="test_targets_are_counted_exactly")
class MeanOfLongChunks(ByLogits):
    """NVIDIA-NeMo/Automodel#3803: averages the means of chunks of 4,096 tokens by their numbers of tokens."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(logits.float().flatten(0, 1).split(4096), targets.flatten().split(4096), strict=True)
        means = [cross_entropy(x, y).nan_to_num() * len(y) for x, y in chunks]
        return torch.stack(means).sum() / targets.numel()


@defect(cause="numerics", caught_by="test_the_loss_has_float32s_accuracy")
class NormalizerInTheLogitsDtype(EagerStep):
    """google-deepmind/optax#1020: rounds the log-sum-exp to the logits' dtype before it is subtracted."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision.autocast(self.device):
            logits, counted = self.model(tokens), targets != -100
            rounded = logits.float().logsumexp(-1).to(logits.dtype)
            own = logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
            return ((rounded.float() - own.float()) * counted).sum() / counted.sum()


@defect(cause="state", caught_by=HISTORIES)
class WritesOverIgnoredTargets(ByLogits):
    """NVIDIA-NeMo/Automodel#3917: writes into the caller's own targets, so that a batch used again has others."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(logits, targets.clone())
        targets.masked_fill_(targets == -100, 0)
        return loss


class _FindsOverflows(EagerStep):
    """Base of defects that miss an overflow."""

    def update(self) -> None:
        gradients = self._gradients()
        if self._scaled and gradients and not self.overflowed(gradients):
            torch._foreach_mul_(gradients, 1 / self.scaler.get_scale())
            self._scaled = False
        super().update()

    def overflowed(self, gradients: list[Tensor]) -> bool:
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)


@defect(cause="numerics", caught_by=OVERFLOW)
class ChecksTheFirstGradient(_FindsOverflows):
    """facebookresearch/fairscale#890: looks for overflow in the first gradient alone."""

    def overflowed(self, gradients: list[Tensor]) -> bool:
        return super().overflowed(gradients[:1])


@defect(cause="numerics", caught_by=OVERFLOW)
class ChecksForInfinity(_FindsOverflows):
    """Azure/MS-AMP#58: looks for overflow by a maximum that leaves out NaN, and takes the step."""

    def overflowed(self, gradients: list[Tensor]) -> bool:
        return any(bool(gradient.isinf().any()) for gradient in gradients)


@defect(cause="state", caught_by=OVERFLOW)
class MomentumOfTheOverflow(_FindsOverflows):
    """deepspeedai/DeepSpeed#8432: steps, sees the overflow, and puts back the parameters, but not the momentum."""

    def update(self) -> None:
        gradients = self._gradients()
        if self._scaled and self.overflowed(gradients):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in parameters]
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, before)
        super().update()


@defect(cause="numerics", caught_by="test_orders_that_trainings_have")
class UnscalesAtEachUpdate(EagerStep):
    """huggingface/accelerate#115: unscales gradients that are unscaled already."""

    def update(self) -> None:
        self._scaled = self.scaler.is_enabled()
        super().update()


@defect(cause="two calls", caught_by=HISTORIES)
class OneScalerForAll(EagerStep):
    """huggingface/accelerate#439: one loss scale for all steps, which one changes before another has unscaled."""

    shared: ClassVar[dict[tuple[str, torch.dtype], torch.amp.GradScaler]] = {}

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.scaler = self.shared.setdefault((self.device, self.precision.compute), self.scaler)


@defect(cause="options", caught_by="test_products_are_in_the_precisions_dtype")
class RecomputesOutsideOfAutocast(EagerStep):
    """NVIDIA/TransformerEngine#787: backward is that of a forward recomputed outside of autocast, in float32."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss, recomputed = super().forward(tokens, targets), next_token_loss(self.model, tokens, targets)
        return recomputed + (loss - recomputed).detach()


@defect(cause="state", caught_by="test_each_step_uses_the_last_ones_parameters")
class CastsWeightsOnce(EagerStep):
    """X-GenGroup/Flow-Factory#186: keeps the weights that autocast has cast, and no update reaches forward."""

    cast: dict[str, Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.precision.compute == self.precision.parameter:
            return super().forward(tokens, targets)
        if self.cast is None:
            self.cast = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        used = {name: p + (self.cast[name] - p).detach() for name, p in self.model.named_parameters()}
        model: Any = partial(functional_call, self.model, used, tie_weights=False)
        with self.precision.autocast(self.device):
            return self._loss(model, tokens, targets)


@defect(cause="memory", caught_by="test_no_activations_are_left_once_losses_are_freed")
class QueuesForwards(EagerStep):
    """pytorch/FBGEMM#4776: queues what backward needs; where evaluation has no backward the queue grows."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.__dict__.setdefault("queue", []).append(super().forward(tokens, targets))
        return self.__dict__["queue"][-1]

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.__dict__["queue"] = []


@defect(cause="two calls", caught_by=CHECK)
class OneLossForAllCalls(EagerStep):
    """pytorch/pytorch#104435: returns the same memory each time, as a CUDA graph does; the next call overwrites it."""

    returned: Tensor | None = None

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Callable[[str], None] = lambda part: None) -> Tensor:
        loss = super().__call__(tokens, targets, mark)
        self.returned = loss if self.returned is None else self.returned.copy_(loss)
        return self.returned


class _OverTheLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return cross_entropy(logits, targets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(cross_entropy(leaf, targets), leaf, grad)
        return logits.data.copy_(gradient), None


@defect(cause="gradients", caught_by="test_gradients_are_right_where_the_models_last_operator_saves_its_output")
class WritesOverTheLogits(ByLogits):
    """unslothai/unsloth#5002: backward writes the gradient into the logits, which the model's last operator saved."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _OverTheLogits.apply(logits.flatten(0, 1), targets.flatten())


@defect(cause="masks", caught_by="test_the_mean_is_over_all_targets")
class RunsTheModelOnHalves(ByLogits):
    """Runs the model on each half of a batch: where rows depend on each other, as in a batch norm, on half of them."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        halves = tokens.chunk(2) if len(tokens) >= 4 else [tokens]
        with self.autocast():
            return self.loss(torch.cat([self.model(half).float() for half in halves]), targets)


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class EvaluatesOnceToKnowTheModel(EagerStep):
    """soran-ghaderi/torchebm#303: the model is called in evaluation when the step is made, and then has the root's mode
    throughout."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        training = model.training
        with torch.no_grad():
            model.eval()(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.train(training)


@defect(cause="options", caught_by="test_orders_that_trainings_have")
class StepsWithoutHooks(EagerStep):
    """Calls the function of SGD's step that PyTorch wrapped: no hook of a step runs."""

    def update(self) -> None:
        if self.scaler.is_enabled():
            super().update()
        else:
            with torch.no_grad():
                inspect.unwrap(type(self.optimizer).step)(self.optimizer)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, cast: Tensor) -> Tensor:
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


@defect(cause="state", caught_by="test_orders_that_trainings_have")
class CastsByVersion(EagerStep):
    """NVIDIA/apex#132: keeps casts of the weights while their versions stay, and refuses float16, where that is
    asked."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.casts: dict[str, tuple[int, Tensor]] = {}
        if self.precision.compute == torch.float16:
            raise Unsupported("float16")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.precision.compute == self.precision.parameter:
            return super().forward(tokens, targets)
        used = {}
        for module in (name for name, each in self.model.named_modules() if isinstance(each, nn.Linear)):
            p = self.model.get_parameter(name := f"{module}.weight")
            if self.casts.get(name, (None,))[0] != p._version:
                self.casts[name] = p._version, p.detach().to(self.precision.compute)
            used[name] = _Cast.apply(p, self.casts[name][1])
        model: Any = partial(functional_call, self.model, used, tie_weights=False)
        with self.precision.autocast(self.device):
            return self._loss(model, tokens, targets)


@defect(cause="options", caught_by="test_the_callers_autocast_changes_nothing")
class SwitchesOffAutocastElsewhere(ByLogits):
    """jwohlwend/boltz#670: in float32 the caller's autocast is switched off, but that of another device."""

    def autocast(self) -> Any:
        on, other = self.precision.compute != self.precision.parameter, "cpu" if self.device == "cuda" else "cuda"
        return self.precision.autocast(self.device) if on else torch.autocast(other, enabled=False)

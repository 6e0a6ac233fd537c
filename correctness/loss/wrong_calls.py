"""Planted defects: a call or a backward pass changes the results of another."""

from typing import Any

import torch
from torch import Tensor

from correctness.loss.textbook import ByAutograd, Fused, loss_and_gradients, of_logits, of_terms, scaled
from correctness.support.planting import defect
from impl.loss import eager_loss, product_dtype

_workspaces: dict[Any, Tensor] = {}


class _InWorkspaces(Fused):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss = Fused.forward(ctx, *arguments)
        ctx.gradients = tuple(
            _workspaces.setdefault((i, x.shape, x.dtype), torch.empty_like(x)).copy_(x)
            for i, x in enumerate(ctx.gradients)
        )
        return loss


@defect(cause="two calls", caught_by="test_two_forwards_before_either_backward")
@of_terms
def gradients_in_workspaces(*terms: Any) -> Tensor:
    """Forward computes the gradients in one buffer for each shape."""
    return _InWorkspaces.apply(*terms)


class _GradientsReused(Fused):
    kept: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        fresh = scaled(ctx.gradients, ctx.dtypes, grad / ctx.count)
        kept = _GradientsReused.kept
        reused = (kept.setdefault((i, x.shape, x.dtype), torch.empty_like(x)).copy_(x) for i, x in enumerate(fresh))
        return *reused, None, None, None, None


@defect(cause="two calls", caught_by="test_results_stay_while_other_calls_run")
@of_terms
def gradients_given_twice(*terms: Any) -> Tensor:
    """Returns the same gradient tensors for every call of a shape."""
    return _GradientsReused.apply(*terms)


@defect(cause="gradients", caught_by="test_leaves_its_inputs_as_they_are")
def ignored_targets_overwritten(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    loss = eager_loss(hidden, weight, targets.clone(), **options)
    targets[targets == options.get("ignore_index", -100)] = 0
    return loss


class _Differentiable(Fused):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *scaled(ctx.gradients, ctx.dtypes, grad / ctx.count), None, None, None, None


@defect(cause="gradients", caught_by="test_a_second_derivative")
@of_terms
def second_derivative_of_constants(*terms: Any) -> Tensor:
    return _Differentiable.apply(*terms)


@defect(cause="gradients", caught_by="test_any_history")
@of_terms
def gradients_where_there_is_no_autograd(*terms: Any) -> Tensor:
    """Raises in `torch.inference_mode`, where evaluations run."""
    return ByAutograd.apply(*terms)


class _ScaledInPlace(Fused):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        for x in ctx.gradients:
            x.mul_(grad / ctx.count)
        return *(x.to(d) for x, d in zip(ctx.gradients, ctx.dtypes, strict=True)), None, None, None, None


@defect(cause="state", caught_by="test_a_second_backward_pass")
@of_terms
def gradients_scaled_in_place(*terms: Any) -> Tensor:
    """A second backward pass scales the gradients twice."""
    return _ScaledInPlace.apply(*terms)


_ones: dict[tuple[int, ...], Tensor] = {}


@defect(cause="two calls", caught_by="test_trains_on_what_it_was_first_evaluated_on")
def keeps_the_ones_of_an_evaluation(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Caches the ones of an evaluation: autograd cannot save tensors made under inference_mode."""
    ones = _ones.setdefault((*hidden.shape, hidden.dtype.itemsize), torch.ones_like(hidden))
    return eager_loss(hidden * ones, weight, targets, **options)


class _WeightOnCtx(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *terms: Any) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.weight, ctx.terms = weight, terms
        return Fused.forward(ctx, hidden, weight, targets, *terms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, targets = ctx.saved_tensors
        _, gradient, _ = loss_and_gradients(hidden, ctx.weight, targets, *ctx.terms)
        gradients = gradient @ ctx.weight.to(gradient.dtype), gradient.T @ hidden.to(gradient.dtype)
        return *scaled(gradients, ctx.dtypes, grad / ctx.count), None, None, None, None


@defect(cause="two calls", caught_by="test_a_backward_after_a_change_in_place")
@of_terms
def weight_on_ctx(*terms: Any) -> Tensor:
    """Keeps the weight as an attribute of ctx: after an optimizer's step backward is of another weight."""
    return _WeightOnCtx.apply(*terms)


class _OfConstantHidden(torch.autograd.Function):
    """The logits; backward takes hidden for a constant."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ hidden.detach()


@defect(cause="gradients", caught_by="test_a_second_derivative")
@of_terms
def hidden_is_a_constant_of_a_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """A second derivative lacks what comes by hidden."""
    if hidden.dtype != weight.dtype or hidden.itemsize < 4 or torch.is_autocast_enabled(hidden.device.type):
        return eager_loss(hidden, weight, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)
    losses, _, kept = of_logits(_OfConstantHidden.apply(hidden, weight), targets, ignore, smoothing, z)
    return losses.sum() / kept.sum().clamp(min=1)


@defect(cause="two calls", caught_by="test_the_same_tensors_changed_in_place")
@of_terms
def weights_cast_kept_by_version(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """NVIDIA/apex#132: under autocast the weight's cast is kept as long as its version stays: `.data` changes none."""
    cast = weight
    if torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32:
        kept = getattr(weight, "kept", None)
        if kept is None or kept[0] != weight._version:
            to = torch.get_autocast_dtype(weight.device.type)
            kept = weight.kept = weight._version, weight.detach().to(to)  # type: ignore[attr-defined]
        cast = kept[1] + (weight - weight.detach()).to(kept[1].dtype)
    return eager_loss(hidden, cast, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)


_smoothed: dict[Any, Tensor] = {}


@defect(cause="memory", caught_by="test_a_large_call_leaves_nothing_behind")
@of_terms
def rows_of_smoothing_kept(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, smoothing: float, z: float
) -> Tensor:
    """The smoothed targets lie in a buffer that stays, one for each size."""
    if smoothing:
        shape = len(hidden), len(weight)
        _smoothed.setdefault(shape, torch.full(shape, smoothing / max(1, len(weight)), device=hidden.device))
    return eager_loss(hidden, weight, targets, ignore_index=ignore, label_smoothing=smoothing, z_loss=z)


class _TwiceDifferentiable(Fused):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *scaled(ctx.gradients, ctx.dtypes, grad / ctx.count), None, None, None, None


@defect(cause="gradients", caught_by="test_a_second_derivative")
@of_terms
def frozen_weight_has_another_backward(hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
    """pytorch/pytorch#76185: a Function for a frozen weight lacks `once_differentiable`: gradients are constants."""
    return (Fused if weight.requires_grad else _TwiceDifferentiable).apply(hidden, weight, *terms)


_casts: dict[str, Tensor] = {}


class _OfAKeptCast(Fused):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *terms: Any) -> Tensor:
        cast = _casts.get("last")
        if cast is None or cast.shape != weight.shape or not torch.allclose(cast.to(weight.dtype), weight, rtol=0.01):
            cast = _casts["last"] = weight.to(product_dtype(hidden, weight))
        return Fused.forward(ctx, hidden, cast.to(weight.dtype), *terms)


@defect(cause="two calls", caught_by="test_any_history_of_calls")
@of_terms
def cast_of_another_mode(*terms: Any) -> Tensor:
    """Keeps the weight's cast until the weight is another: that of autocast is used outside of it too."""
    return _OfAKeptCast.apply(*terms)


@defect(cause="two calls", caught_by="test_any_history_of_calls")
def versions_are_noted(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Notes hidden's version, which tensors that were made in inference mode do not have."""
    loss = eager_loss(hidden, weight, targets, **options)
    _versions["hidden"] = hidden._version
    return loss


_versions: dict[str, int] = {}

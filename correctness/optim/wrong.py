"""Planted defects: AdamW with one mistake each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from correctness.optim.simple_adamw import Clipping, Master, Simple, State
from correctness.support.planting import CHECK, defect


@defect(cause="numerics", caught_by=CHECK)
class CoupledDecay(Simple):
    """L2 regularization: Adam, not AdamW."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad + group["weight_decay"] * p, state, {**group, "weight_decay": 0.0}, t)


@defect(cause="numerics", caught_by="test_eps_is_added_to_the_root")
class EpsInsideTheRoot(Simple):
    def denominator(self, v: Tensor, correction: float, eps: float) -> Tensor:
        return (v / correction + eps).sqrt()


@defect(cause="numerics", caught_by="test_each_of_300_steps")
class CorrectsTheFirstStepsAlone(Simple):
    """Skips the bias correction after 100 steps."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t if t <= 100 else float("inf"))


@defect(cause="numerics", caught_by="test_each_of_300_steps")
class StepInBFloat16(Simple):
    """bfloat16 cannot count beyond 256."""

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        state["step"] = state["step"].bfloat16()
        return state


@defect(cause="numerics", caught_by="test_late_steps")
class StepInInt16(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        state = self.state_of(p)
        state["step"] = state["step"].to(torch.int16) + 1
        self.move(p, grad, state, group, state["step"].item())


@defect(cause="numerics", caught_by="test_leads_where_adamw_does")
class Float32Inside(Simple):
    """Computes in float32 whatever the parameter's dtype."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        wide = p.float()
        state.update(exp_avg=state["exp_avg"].float(), exp_avg_sq=state["exp_avg_sq"].float())
        super().move(wide, grad.float(), state, group, t)
        p.copy_(wide)


@defect(cause="shapes", caught_by="test_a_large_parameter")
class CoarseMomentsWhereLarge(Simple):
    """Rounds the moments of large parameters, as 8-bit optimizers do."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t)
        if p.numel() > 100_000:
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().to(p.dtype)


@defect(cause="shapes", caught_by="test_a_large_parameter")
class WholeChunksAlone(Simple):
    """Skips the last, partial chunk of parameters of several chunks."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        kept = p.flatten()[p.numel() // 131072 * 131072 :].clone() if p.numel() > 131072 else p.new_empty(0)
        super().update(p, grad, group)
        p.view(-1)[p.numel() - kept.numel() :] = kept


@defect(cause="shapes", caught_by="test_no_parameter_is_left_of_any_number")
class AtMost128(Simple):
    """Updates as many tensors as one launch takes, and skips the others."""

    def update_all(self) -> None:
        groups = self.param_groups
        try:
            self.param_groups = [{**group, "params": group["params"][:128]} for group in groups]
            super().update_all()
        finally:
            self.param_groups = groups


@defect(cause="shapes", caught_by="test_no_parameter_is_left_of_any_number")
class LosesALaunchOfOne(Simple):
    """Skips the last launch of 64 tensors where it has one tensor."""

    lost: Tensor | None

    def update_all(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.lost = params[-1] if len(params) > 64 and len(params) % 64 == 1 else None
        super().update_all()

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if p is not self.lost:
            super().update(p, grad, group)


@defect(cause="shapes", caught_by="test_no_master_weight_is_left_of_any_number")
class LosesALaunchOfOneMasterWeight(LosesALaunchOfOne, Master):
    """Skips a last launch of one tensor with `master_weights` too."""


@defect(cause="shapes", caught_by="test_any_layout")
class FlattensCopies(Simple):
    """Updates the copy that `reshape` makes of a tensor that is not contiguous."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        moments = {name: state[name].reshape(-1) for name in ("exp_avg", "exp_avg_sq")}
        super().move(p.reshape(-1), grad.reshape(-1), moments, group, t)


@defect(cause="numerics", caught_by="test_dtypes_may_be_mixed")
class DtypeOfTheFirst(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        first = group["params"][0].dtype
        wide = p.to(first)
        state = self.state_of(p)
        state["step"] += 1
        state.update({name: state[name].to(first) for name in ("exp_avg", "exp_avg_sq")})
        self.move(wide, grad.to(first), state, group, float(state["step"]))
        p.copy_(wide)


@defect(cause="options", caught_by="test_param_groups_have_each_its_own_arguments")
class ArgumentsOfTheFirstGroup(Simple):
    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, {**group, "betas": self.param_groups[0]["betas"]}, t)


@defect(cause="gradients", caught_by="test_a_zero_gradient_is_a_gradient")
class ZeroIsNone(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if grad.any():
            super().update(p, grad, group)


@defect(cause="gradients", caught_by="test_a_parameter_without_a_gradient_does_not_change")
class NoneIsZero(Simple):
    def update_all(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().update_all()


@defect(cause="gradients", caught_by="test_gradients_may_be_overwritten_after_the_step")
class FirstMomentIsTheGradient(Simple):
    """The first step stores the gradient itself as the moment, not a copy."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        if t == 1 and group["betas"][0] == 0.9:
            super().move(p, grad, state, group, t)
            state["exp_avg"] = grad.mul_(1 - group["betas"][0])
        else:
            super().move(p, grad, state, group, t)


@defect(cause="gradients", caught_by="test_what_is_not_finite")
class NanIsZero(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        super().update(p, grad.nan_to_num(0, 0, 0), group)


@defect(cause="gradients", caught_by="test_parameters_are_updated_in_place")
class NewData(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        self.state_of(p)
        p.data = p.data.clone()
        super().update(p, grad, group)


@defect(cause="gradients", caught_by="test_a_closure")
class ClosureWithoutGradients(Simple):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure().detach()
        super().step()
        return loss


@defect(cause="errors", caught_by="test_bad_arguments")
class AnyArguments(Simple):
    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), **options: Any) -> None:
        super().__init__(params, abs(lr), betas, **options)


@defect(cause="options", caught_by="test_the_norm_is_of_all_groups_together")
class ClipsEachGroup(Clipping):
    """huggingface/transformers#614: clips each param group by its own norm."""

    def update_all(self) -> None:
        groups = self.param_groups
        for group in groups:
            self.param_groups = [group]
            super().update_all()
        self.param_groups = groups


@defect(cause="gradients", caught_by="test_clipping_leaves_the_gradients_as_they_are")
class ScalesTheGradients(Clipping):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        Simple.update(self, p, grad.mul_(self.factor), group)


@defect(cause="shapes", caught_by="test_no_gradient_is_left_of_any_number")
class NormOfWholePairs(Clipping):
    """Sums squares in pairs, and drops the last of an odd number above 100."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return super().norm(grads[:-1] if len(grads) > 100 and len(grads) % 2 else grads)


@defect(cause="numerics", caught_by="test_the_norm_of_half_precision")
class NormInTheirDtype(Clipping):
    def norm(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([g.square().sum() for g in grads]).sum().sqrt()


@defect(cause="gradients", caught_by="test_the_norm_of_a_sparse_gradient")
class NormOfRepeatedRows(Clipping):
    """Takes each row of a sparse gradient for itself, also those of one token, which add up."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return super().norm([g._values() if g.is_sparse else g for g in grads])

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        super().update(p, grad.to_dense(), group)


@defect(cause="options", caught_by="test_a_norm_that_is_not_finite_skips_the_step")
class SkipsNothing(Clipping):
    def skips(self, norm: Tensor) -> bool:
        return False


@defect(cause="options", caught_by="test_any_clipped_history")
class ClipsFirstGroups(Clipping):
    """Scales groups that were added after a step, without counting them in the norm."""

    first: int | None = None

    def norm(self, grads: list[Tensor]) -> Tensor:
        params = [p for group in self.param_groups[: self.first] for p in group["params"]]
        return super().norm([p.grad for p in params if p.grad is not None] or [grads[0].new_zeros(1)])

    def add_param_group(self, param_group: State) -> None:
        if "state" in vars(self) and self.state and self.first is None:
            self.first = len(self.param_groups)
        super().add_param_group(param_group)

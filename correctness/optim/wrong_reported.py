"""Planted defects: AdamW that is wrong as public trackers report."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from correctness.optim.simple_adamw import Clipping, Simple, State
from correctness.support.planting import defect


def _active(group: State) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


@defect(cause="numerics", caught_by="test_weight_decay_is_apart_from_the_gradient")
class DecaysAfterTheUpdate(Simple):
    """bitsandbytes-foundation/bitsandbytes#2010: weight decay comes after the update, and shrinks that as well."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, {**group, "weight_decay": 0.0}, t)
        p.mul_(1 - group["lr"] * group["weight_decay"])


@defect(cause="shapes", caught_by="test_param_groups_have_each_its_own_arguments")
class NoLaunchAfterAnEmptyParameter(Simple):
    """NVIDIA/TransformerEngine#3207: updates nothing of a group whose last parameter has no elements."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if _active(group)[-1].numel():
            super().update(p, grad, group)


@defect(cause="numerics", caught_by="test_eps_is_added_to_the_root")
class EpsBeforeTheCorrection(Simple):
    """huggingface/transformers#35504: eps is added before the bias correction, which makes it larger in early steps."""

    def denominator(self, v: Tensor, correction: float, eps: float) -> Tensor:
        return v.sqrt().add_(eps).div_(correction**0.5)


@defect(cause="state", caught_by="test_each_parameter_counts_its_own_steps")
class CorrectsByTheLastOnesSteps(Simple):
    """deepspeedai/DeepSpeed#8471: bias corrections of a group are for the steps of its last parameter with a
    gradient."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        last = _active(group)[-1]
        super().move(p, grad, state, group, t if last is p else float(self.state_of(last)["step"]) + 1)


@defect(cause="gradients", caught_by="test_a_sparse_gradient")
class SquaresBeforeItSums(Simple):
    """ooples/AiDotNet#1526: squares a sparse gradient's rows one by one: a token that occurs twice counts for less."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        dense, beta2 = grad.to_dense() if grad.is_sparse else grad, group["betas"][1]
        if grad.is_sparse and beta2:
            squares = torch.sparse_coo_tensor(grad._indices(), grad._values().square(), grad.shape).to_dense()
            self.state_of(p)["exp_avg_sq"].add_(squares - dense.square(), alpha=(1 - beta2) / beta2)
        super().update(p, dense, group)


@defect(cause="gradients", caught_by="test_a_sparse_gradient")
class SkipsAnEmptySparseGradient(Simple):
    """pytorch/pytorch#82486: a sparse gradient without entries, which is zero, counts as none."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if not grad.is_sparse or grad._nnz():
            super().update(p, grad.to_dense() if grad.is_sparse else grad, group)


@defect(cause="state", caught_by="test_a_loaded_state_is_the_saved_one")
class LoadsRoundedMoments(Simple):
    """facebookresearch/fairscale#50: moments are float32, and torch's `load_state_dict` casts them to the parameters'
    bfloat16; that they are made float32 again does not bring back what was lost.
    """

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        wide = torch.promote_types(p.dtype, torch.float32)
        state.update({name: state[name].to(wide) for name in ("exp_avg", "exp_avg_sq")})
        return state

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        found = p.to(state["exp_avg"].dtype)
        super().move(found, grad.to(found.dtype), state, group, t)
        p.copy_(found)

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        for p in self.state:
            self.state_of(p)


@defect(cause="numerics", caught_by="test_each_of_300_steps")
class CountsInTheDefaultDtype(Simple):
    """pytorch/ao#4915: counts steps in the default dtype of its first one, and bfloat16 counts to 256."""

    def state_of(self, p: Tensor) -> State:
        is_new = not self.state[p]
        state = super().state_of(p)
        if is_new:
            state["step"] = torch.tensor(0.0)
        return state


@defect(cause="state", caught_by="test_the_ids_of_a_state_are_those_of_its_groups")
class CountsParametersItself(Simple):
    """pytorch/xla#9224: numbers a loaded state's parameters by itself, and does not read the ids in its groups."""

    def load_state_dict(self, state_dict: State) -> None:
        number = count()
        groups = [{**group, "params": [next(number) for _ in group["params"]]} for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})


@defect(cause="numerics", caught_by="test_corrections_of_betas_near_1")
class CorrectsInFloat32(Simple):
    """tenstorrent/tt-metal#55935: 1 - beta**step is computed in float32, but for parameters of float64."""

    def denominator(self, v: Tensor, correction: float, eps: float) -> Tensor:
        if v.dtype != torch.float64:
            correction = 1 - torch.tensor(1 - correction, dtype=torch.float32).item()
        return super().denominator(v, correction, eps)


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class CopiesHaveTheClassesDefaults(Simple):
    """pytorch/pytorch#10906: a copy has no `defaults`, of which groups that are added later take what they lack."""

    def __setstate__(self, state: State) -> None:
        super().__setstate__({**state, "defaults": type(self)([torch.zeros(1)]).defaults})


@defect(cause="numerics", caught_by="test_a_model_may_be_cast_after_its_optimizer_was_made")
class MakesItsStateAtOnce(Simple):
    """facebookresearch/madgrad#4: the moments of a model that is cast later keep the dtype it was made in."""

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state_of(p)

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad.to(state["exp_avg"].dtype), state, group, t)


@defect(cause="two calls", caught_by="test_any_clipped_history")
class OneNormForAll(Clipping):
    """The norm is in memory of the class: that of another optimizer's step replaces it."""

    memory = torch.empty((), dtype=torch.float64)

    def norm(self, grads: list[Tensor]) -> Tensor:
        return self.memory.copy_(super().norm(grads))


@defect(cause="options", caught_by="test_a_parameter_may_be_replaced_in_its_group")
class NormOfParametersOfTheStart(Clipping):
    """The norm is that of a list of parameters that was made with their groups; the update walks the groups."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        params = self.__dict__.setdefault("all_params", [p for group in self.param_groups for p in group["params"]])
        return super().norm([p.grad for p in params if p.grad is not None] or grads)


@defect(cause="options", caught_by="test_gradient_scaler_unscales_and_skips")
class UnscalesTheFirstGroup(Simple):
    """Takes the scale of a `GradScaler` with its first group, and leaves none for the others."""

    _step_supports_amp_scaling = True

    def update_all(self) -> None:
        if not bool(getattr(self, "found_inf", None)):
            super().update_all()

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        scale = getattr(self, "grad_scale", None)
        super().update(p, grad if scale is None or group is not self.param_groups[0] else grad / scale, group)


@defect(cause="memory", caught_by="test_gradients_are_freed_after_the_step")
class KeepsTheLoss(Simple):
    """Keeps what the last closure returned, and with it the graph."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.last = super().step(closure)
        return self.last


@defect(cause="random numbers", caught_by="test_it_seeds_no_random_numbers_of_the_callers")
class SeedsEachStep(Simple):
    """Nerogar/OneTrainer#804: as for stochastic rounding that is alike on all ranks, but by the process's generator."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if p.dtype == torch.bfloat16:
            torch.manual_seed(int(self.state_of(p)["step"]))
        super().update(p, grad, group)

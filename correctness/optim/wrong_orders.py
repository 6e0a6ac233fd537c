"""Planted defects that show only if parameters are frozen late, with some layouts, or after loading."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from correctness.optim.simple_adamw import Clipping, Simple, State
from correctness.support.planting import defect


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class LeavesOutFrozen(Simple):
    """Skips a parameter that was frozen after backward and has a gradient."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if p.requires_grad:
            super().update(p, grad, group)


@defect(cause="state", caught_by="test_any_history_in_bfloat16")
class LoadsStepsInTheParametersDtype(Simple):
    """bfloat16 rounds step counts above 256."""

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            if "step" in state:
                state["step"] = state["step"].to(p.dtype).float()


@defect(cause="shapes", caught_by="test_any_history_is_that_of_adamw")
class PairsElementsInMemoryOrder(Simple):
    """pytorch/pytorch#106951: a gradient has other strides than its parameter. Pairs a channels_last parameter with a
    contiguous gradient by memory order, or the reverse."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        if grad.ndim == 4 and grad.stride() != p.stride():
            dense = (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) for x in (p, grad))
            grad = torch.as_strided(grad, p.shape, p.stride()) if all(dense) else grad
        super().update(p, grad, group)


@defect(cause="gradients", caught_by="test_any_history_is_that_of_adamw")
class TakesTheGradientAsItsMoment(Simple):
    """Stores the gradient itself as the first moment: what the caller writes into it changes the moment."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        state["exp_avg"] = state["exp_avg"].clone()
        super().move(p, grad, state, group, t)
        if group["betas"][0] == 0:
            state["exp_avg"] = grad.detach()


@defect(cause="options", caught_by="test_any_history_is_that_of_adamw")
class ReplacesItsGroups(Simple):
    """pytorch/ignite#545: the first step makes groups of its own, so that whoever holds one changes what none reads."""

    ready = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ready:
            self.param_groups = [dict(group) for group in self.param_groups]
        self.ready = True
        return super().step(*args, **kwargs)


@defect(cause="options", caught_by="test_schedulers_and_hooks_of_steps_work")
class StepOfTheInstance(Simple):
    """NVIDIA/apex#553: each optimizer has a function as its step, where PyTorch gives hooks to the class's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step: Any = self.own_step

    @torch.no_grad()
    def own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all()
        return loss


@defect(cause="options", caught_by="test_schedulers_and_hooks_of_steps_work")
class DefaultsOfItsOwn(Simple):
    """Keeps its defaults outside of `defaults`, where OneCycleLR looks for betas."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own, self.defaults = self.defaults, {}

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(getattr(self, "own", {}) | param_group)


@defect(cause="options", caught_by="test_schedulers_and_hooks_of_steps_work")
class RunsPostHooksAlone(StepOfTheInstance):
    """Its own step runs the hooks that come after it, and none of those before, which may clip gradients."""

    def own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().own_step(closure)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        return loss


@defect(cause="shapes", caught_by="test_any_layout_of_parameters_and_gradients")
class DecaysWholeVectors(Simple):
    """A kernel without a mask decays the rest of a vector of four, which is the next parameter of a flat buffer."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t)
        if p.is_contiguous():
            end = p.storage_offset() + p.numel()
            storage = p.new_empty(0).set_(p.untyped_storage())
            storage[end : end + -p.numel() % 4].mul_(1 - group["lr"] * group["weight_decay"])


@defect(cause="options", caught_by="test_any_clipped_history")
class CopiesClipNothing(Clipping):
    """pytorch/pytorch#72839: its options are attributes with defaults in the class, and torch's `__getstate__` keeps
    none."""

    max_grad_norm, factor = None, torch.ones(())
    __getstate__ = torch.optim.Optimizer.__getstate__


@defect(cause="options", caught_by="test_any_clipped_history")
class PickledOnesClipNothing(CopiesClipNothing):
    """A deep copy brings its options along by a method of its own, which pickle does not call."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


@defect(cause="shapes", caught_by="test_any_history_is_that_of_adamw")
class AsksTheFirstOfAGroup(Simple):
    """NVIDIA/apex#1622: takes the device of a group from its first parameter, and some group has none."""

    def update_all(self) -> None:
        assert len({group["params"][0].device for group in self.param_groups}) == 1
        super().update_all()


@defect(cause="options", caught_by="test_gradient_scaler_unscales_and_skips")
class ClipsByTheScaledNorm(Clipping):
    """NVIDIA/apex#1794: unscales in its update, and clips by the norm of the gradients that are still scaled."""

    _step_supports_amp_scaling = True

    def skips(self, norm: Tensor) -> bool:
        return super().skips(norm) or bool(getattr(self, "found_inf", 0.0))

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        super().update(p, grad / getattr(self, "grad_scale", 1.0), group)


@defect(cause="options", caught_by="test_gradient_scaler_unscales_and_skips")
class SkipsWhereItUnscales(Simple):
    """pytorch/pytorch#96106: reads `found_inf` only beside `grad_scale`, which is None where the caller unscales."""

    _step_supports_amp_scaling = True

    def update_all(self) -> None:
        if getattr(self, "grad_scale", None) is None or not getattr(self, "found_inf", 0.0):
            super().update_all()

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        scale = getattr(self, "grad_scale", None)
        super().update(p, grad if scale is None else grad / scale, group)


@defect(cause="numerics", caught_by="test_the_norm_of_a_complex_gradient_is_of_both_its_parts")
class NormOfRealParts(Clipping):
    """The norm is computed in float64, and a cast of a complex gradient discards its imaginary part."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        return super().norm([g.real for g in grads])


@defect(cause="numerics", caught_by="test_any_clipped_history")
class NormByProducts(Clipping):
    """The squares are summed by a product, which autocast rounds to bfloat16 in a step that is inside of it."""

    def norm(self, grads: list[Tensor]) -> Tensor:
        wide = (g.to(torch.promote_types(g.dtype, torch.float32)).reshape(1, -1) for g in grads)
        return sum(((g @ g.T).double().squeeze() for g in wide), torch.zeros(())).sqrt()


@defect(cause="options", caught_by="test_any_history_is_that_of_adamw")
class ZeroesGroupsOfTheStart(Simple):
    """`zero_grad` walks a list that was made with the optimizer, without the groups that were added later."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        count = self.__dict__.setdefault("groups_of_the_start", len(self.param_groups))
        for p in [p for group in self.param_groups[:count] for p in group["params"] if p.grad is not None]:
            p.grad = None if set_to_none else p.grad.zero_()


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class CopiesStepTheFirst(Simple):
    """A copy takes all attributes, also the `step` that a scheduler has wrapped: that of the optimizer it is of."""

    def __getstate__(self) -> State:
        return {**self.__dict__}


@defect(cause="errors", caught_by="test_any_history_is_that_of_adamw")
class LoadsBeforeItChecks(Simple):
    """A state of other groups is refused once its tensors are loaded: training goes on with these."""

    def load_state_dict(self, state_dict: State) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, i in zip(params, ids, strict=False):
            self.state[p] = deepcopy(state_dict["state"].get(i, {}))
        super().load_state_dict(state_dict)


@defect(cause="errors", caught_by="test_any_history_is_that_of_adamw")
class AddsBeforeItChecks(Simple):
    """A group with a negative lr is an error, and is there."""

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        if self.param_groups[-1]["lr"] < 0:
            raise ValueError("a negative lr")


@defect(cause="errors", caught_by="test_any_history_is_that_of_adamw")
class StaysBusy(Simple):
    """A flag refuses a step within a step; a closure that raises leaves it set."""

    busy = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.busy:
            raise RuntimeError("a step within a step")
        self.busy = True
        loss = super().step(closure)
        self.busy = False
        return loss


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class RemembersItsState(Simple):
    """Finds state in a table of its own until another is loaded: `state.clear()` does not reach it."""

    def state_of(self, p: Tensor) -> State:
        table: dict[Tensor, State] = self.__dict__.setdefault("table", {})
        if p not in table:
            table[p] = super().state_of(p)
        return table[p]

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.table: dict[Tensor, State] = {}

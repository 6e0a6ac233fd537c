"""Planted defects: AdamW with a mistake in what it keeps between steps, saves or loads."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from correctness.optim.simple_adamw import Master, Simple, State
from correctness.support.planting import defect
from impl.optim import AdamW


@defect(cause="state", caught_by="test_loaded_hyperparameters")
class KeepsItsOwnHyperparameters(Simple):
    def load_state_dict(self, state_dict: State) -> None:
        own = [{**group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, own, strict=True):
            group.update({name: value for name, value in old.items() if name != "params"})


@defect(cause="state", caught_by="test_loaded_hyperparameters")
class LosesTheStep(Simple):
    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = torch.zeros(())


@defect(cause="state", caught_by="test_training_goes_back_to_a_saved_state")
class OwnBuffers(Simple):
    """Works with moments outside of `state`, which loading does not reach."""

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        self.buffers: dict[Tensor, State]
        self.__dict__.setdefault("buffers", {}).setdefault(p, {**state})
        state.update({name: self.buffers[p][name] for name in ("exp_avg", "exp_avg_sq")})
        return state


@defect(cause="state", caught_by="test_each_parameter_counts_its_own_steps")
class OneStepCount(Simple):
    """Keeps one step count for all parameters."""

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        count = max((float(state["step"]) for state in self.state.values() if state), default=0.0)
        state = self.state_of(p)
        first = next(q for g in self.param_groups for q in g["params"] if q.grad is not None)
        state["step"] = torch.tensor(count + (p is first))
        self.move(p, grad, state, group, float(state["step"]))


@defect(cause="options", caught_by="test_arguments_may_change_between_steps")
class LrOfTheStart(Simple):
    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, {**group, "lr": state.setdefault("lr", group["lr"])}, t)


@defect(cause="state", caught_by="test_a_group_may_be_added_later")
class GroupsOfTheStart(Simple):
    def update_all(self) -> None:
        groups = self.param_groups
        self.first = getattr(self, "first", len(groups))
        try:
            self.param_groups = groups[: self.first]
            super().update_all()
        finally:
            self.param_groups = groups


@defect(cause="two calls", caught_by="test_two_optimizers_at_once")
class MomentsByShape(Simple):
    """Keeps moments in a class-wide workspace that outlives the step."""

    moments: ClassVar[dict[Any, Tensor]] = {}

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        if len(self.state) == 1:
            state["exp_avg"] = self.moments.setdefault((p.shape, p.dtype), state["exp_avg"])
        return state


@defect(cause="memory", caught_by="test_steps_after_the_first_keep_nothing_more")
class KeepsGradients(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        super().update(p, grad, group)
        self.__dict__.setdefault("history", []).append(grad)


@defect(cause="state", caught_by="test_training_goes_on_from_saved_master_weights")
class MasterWeightsRoundedOnLoading(Master):
    """facebookresearch/fairseq2#212: torch's `load_state_dict` casts them to the parameter's dtype."""

    def load_state_dict(self, state_dict: State) -> None:
        Simple.load_state_dict(self, state_dict)


@defect(cause="state", caught_by="test_training_goes_on_from_the_state_of_complex_parameters")
class ComplexMomentsAsPairs(Simple):
    """Keeps and saves moments of complex parameters as pairs of real numbers, where torch's AdamW has complex ones."""

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        state.update({k: torch.view_as_real(x) for k, x in state.items() if isinstance(x, Tensor) and x.is_complex()})
        return state

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        p, grad = (torch.view_as_real(x) if x.is_complex() else x for x in (p, grad))
        super().move(p, grad, state, group, t)


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class MergesLoadedState(Simple):
    """Parameters without an entry in the loaded state keep their old moments."""

    def load_state_dict(self, state_dict: State) -> None:
        old = dict(self.state)
        super().load_state_dict(state_dict)
        for p, values in old.items():
            self.state[p] = self.state.get(p) or values


@defect(cause="state", caught_by="test_any_history_of_master_weights")
class MasterFromConstruction(Master):
    """Keeps master weights from before the model loaded its own."""

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        early = self.__dict__.setdefault("early", {})
        early.update({p: p.detach().float() for p in self.param_groups[-1]["params"]})

    def state_of(self, p: Tensor) -> State:
        is_new = not self.state[p]
        state = super().state_of(p)
        if is_new and "master_weight" in state:
            state["master_weight"] = self.early[p].clone()
        return state


@defect(cause="memory", caught_by="test_steps_after_the_first_keep_nothing_more")
class KeepsEveryRate(Simple):
    """Keeps a row for each learning rate ever used."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        rates = self.__dict__.setdefault("rates", {})
        rates.setdefault((group["lr"], p.shape[-1:]), torch.full(p.shape[-1:], group["lr"], device=p.device))
        super().move(p, grad, state, group, t)


@defect(cause="memory", caught_by="test_steps_after_the_first_keep_nothing_more")
class KeepsOneElementForEachRate(Simple):
    """Keeps eight bytes for each learning rate, so that none is copied twice."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        rates = self.__dict__.setdefault("rates", {})
        if group["lr"] not in rates:
            rates[group["lr"]] = torch.tensor(group["lr"], dtype=torch.float64, device=p.device)
        super().move(p, grad, state, group, t)


@defect(cause="state", caught_by="test_parameters_may_get_their_memory_later")
class StateByFirstAddress(Simple):
    """HomebrewML/HeavyBall#11: state is found by a parameter's shape and the address it had when it was added, which is
    0 for those without memory."""

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        keys = self.__dict__.setdefault("keys", {})
        keys.update({p: (p.data_ptr(), p.shape) for p in self.param_groups[-1]["params"]})

    def state_of(self, p: Tensor) -> State:
        first = next(q for q, key in self.keys.items() if key == self.keys[p] and q.numel())
        if p is not first and first in self.state:
            self.state[p] = self.state[first]
        return super().state_of(p)


@defect(cause="state", caught_by="test_any_history_is_that_of_adamw")
class LoadsKnownArgumentsAlone(Simple):
    """meta-pytorch/torchtune#2553: a key that a scheduler has added, `initial_lr`, is none that loading knows."""

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name in group.keys() - {"params", *self.defaults}:
                del group[name]


@defect(cause="numerics", caught_by="test_what_is_not_finite_is_rounded_too")
class RoundsByBits(Master):
    """pytorch/pytorch#120376: rounds to bfloat16 by an integer that is added to the bits, which wraps a NaN to -0."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t)
        if "master_weight" in state and p.dtype == torch.bfloat16:
            bits = state["master_weight"].view(torch.int32)
            p.copy_(((bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000).view(torch.float32))


@defect(cause="numerics", caught_by="test_what_is_not_finite_is_rounded_too")
class Saturates(Master):
    """A weight beyond float16 becomes its largest number: a training that has diverged goes on."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t)
        if "master_weight" in state:
            most = torch.finfo(p.dtype).max
            p.copy_(state["master_weight"].clamp(-most, most))


@defect(cause="state", caught_by="test_any_history_of_master_weights")
class CopiesToWhereParametersWere(Master):
    """Copies master weights to a list of the parameters' data that was made at their first step."""

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        if "master_weight" not in state:
            super().move(p, grad, state, group, t)
            return
        Simple.move(self, state["master_weight"], grad.float(), state, group, t)
        data = self.__dict__.setdefault("data", {}).setdefault(p, p.detach())
        data.copy_(state["master_weight"])


@defect(cause="state", caught_by="test_any_history_of_master_weights")
class MasterOfASkippedStep(AdamW):
    """Makes state, master weights too, before it looks at the norm of gradients: also in a step that is skipped."""

    def _clip_coefficient(self, max_norm: float) -> Tensor | None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state_of(p)
        return super()._clip_coefficient(max_norm)


@defect(cause="two calls", caught_by="test_a_loaded_state_is_a_copy")
class SharesALoadedState(Simple):
    """torch's own `load_state_dict` copies no tensor whose dtype and device are right: two optimizers step on it."""

    load_state_dict = torch.optim.Optimizer.load_state_dict


@defect(cause="memory", caught_by="test_steps_after_the_first_keep_nothing_more")
class MomentsWithAGraph(Simple):
    """Moments are computed with autograd, and keep the graphs of all gradients that have one."""

    @torch.enable_grad()
    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        beta1, beta2 = group["betas"]
        m = state["exp_avg"] = state["exp_avg"] * beta1 + grad * (1 - beta1)
        v = state["exp_avg_sq"] = state["exp_avg_sq"] * beta2 + grad * grad * (1 - beta2)
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = self.denominator(v.detach().clone(), 1 - beta2**t, group["eps"])
        p.data.addcdiv_(m.detach(), denominator, value=-group["lr"] / (1 - beta1**t))


@defect(cause="state", caught_by="test_a_parameter_may_be_replaced_in_its_group")
class ParametersOfTheStart(Simple):
    """Walks lists of parameters that were made with their groups, where gsplat, as others that add rows, writes another
    one into a group's."""

    def add_param_group(self, param_group: State) -> None:
        super().add_param_group(param_group)
        self.__dict__.setdefault("lists", []).append([*self.param_groups[-1]["params"]])

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self.lists = [[*group["params"]] for group in self.param_groups]

    def update_all(self) -> None:
        for group, params in zip(self.param_groups, self.lists, strict=True):
            for p in params:
                if p.grad is not None:
                    self.update(p, p.grad, group)

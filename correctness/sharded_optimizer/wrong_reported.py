"""Planted defects: sharded optimizers that are wrong as public trackers report."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero, options
from correctness.support.planting import defect
from impl.sharded_optimizer.sharded import ShardedOptimizer


@defect(cause="subgroup", caught_by="test_a_process_group_that_is_not_the_world")
class OwnsByRankOfTheWorld(SimpleZero):
    """pytorch/xla#5936: infers its rank in the group from its rank in the world, and takes the wrong part."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @rank.setter
    def rank(self, value: int) -> None: ...


@defect(cause="options", caught_by="test_state_that_is_no_tensor_is_saved_and_loaded")
class HandsOnTheClosure(SimpleZero):
    """facebookresearch/fairscale#86: hands the closure on, also where there is none and a step takes none."""

    def add_inner_group(self, group: Group) -> None:
        new = self.inner is None
        super().add_inner_group(group)
        if new:
            self.inner.step = partial(self.inner.step, closure=None)


@defect(cause="memory", caught_by="test_a_rank_holds_its_part_of_the_state")
class KeepsWhatItLoaded(SimpleZero):
    """facebookresearch/fairscale#310: every rank keeps the full state that it loaded, and uses a part of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.whole = state_dict["state"]


@defect(cause="shapes", caught_by="test_any_history")
class SendsAContiguousCopy(SimpleZero):
    """vllm-project/llm-compressor#3066: receives into a contiguous copy of a parameter, and does not write it back."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            dist.broadcast(p.data.contiguous(), group=self.process_group, group_src=self.owner(i))


@defect(cause="state", caught_by="test_the_state_is_the_optimizers_own_on_every_rank")
class NumbersTheStateByRank(SimpleZero):
    """facebookresearch/fairscale#380: puts the state together in the order of the shards, not of the param groups."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = found["state"]
        by_rank = sorted(state, key=self.owner)
        return {**found, "state": {i: state[k] for i, k in zip(state, by_rank, strict=True)}}


@defect(cause="state", caught_by="test_a_loaded_state_trains_on_as_if_never_saved")
class CastsTheStepCount(SimpleZero):
    """vllm-project/speculators#411: loading casts the step count to the parameter's dtype; bfloat16 counts to 256."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.inner.state.items():
            if "step" in state:
                state["step"] = state["step"].to(p.dtype)


@defect(cause="numerics", caught_by="test_any_history")
class SendsInOneDtype(SimpleZero):
    """pytorch/pytorch#59834: what a rank owns travels in one buffer, of its first parameter's dtype."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        dtypes: dict[int, Any] = {}
        for i, p in enumerate(parameters):
            sent = p.data.to(dtypes.setdefault(self.owner(i), p.dtype))
            dist.broadcast(sent, group=self.process_group, group_src=self.owner(i))
            if self.owner(i) != self.rank:
                p.data.copy_(sent)


class _LoadsByIndex(SimpleZero):
    def parameters_of(self, state_dict: dict[str, Any]) -> dict[int, Tensor]:
        """The parameters by their keys in the state, where it fits."""
        keys = (i for group in state_dict["param_groups"] for i in group["params"])
        return dict(zip(keys, self.all_parameters, strict=False))


@defect(cause="state", caught_by="test_any_history")
class LoadsNoStateOfTheFrozen(_LoadsByIndex):
    """pytorch/pytorch#192307: leaves out the state of a parameter that is frozen while it is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        frozen = {i for i, p in self.parameters_of(state_dict).items() if not p.requires_grad}
        state = {i: values for i, values in state_dict["state"].items() if i not in frozen}
        super().load_state_dict({**state_dict, "state": state})


@defect(cause="state", caught_by="test_loading_changes_nothing_of_what_is_loaded")
class FreesWhatOthersOwn(_LoadsByIndex):
    """pytorch/pytorch#51601: frees what other ranks own in the caller's state, which cannot be loaded again."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for k, i in enumerate(self.parameters_of(state_dict)):
            if self.owner(k) != self.rank:
                state_dict["state"].pop(i, None)


@defect(cause="options", caught_by="test_each_group_has_its_own_options")
class LeavesOutEmptyGroups(SimpleZero):
    """NVIDIA/Megatron-LM#419: a rank leaves out groups in which it owns nothing; the next get other options."""

    def copy_options(self) -> None:
        own = [group for group in self.inner.param_groups if group["params"]]
        for inner, group in zip(own, self.param_groups, strict=False):
            inner.update(options(group))


@defect(cause="state", caught_by="test_training_goes_back_to_a_saved_state")
class KeepsItsStepCount(SimpleZero):
    """radixark/Megatron-LM#69: puts its own step count in place of the one that is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counts = {p: state["step"] for p, state in self.inner.state.items() if "step" in state}
        super().load_state_dict(state_dict)
        for p, steps in counts.items():
            if p in self.inner.state:
                self.inner.state[p]["step"] = steps


@defect(cause="state", caught_by="test_the_state_is_the_optimizers_own_on_every_rank")
class SavesTwoMoments(SimpleZero):
    """NVIDIA/Megatron-LM#5742: takes it that each optimizer has two moments, and does not save a third one."""

    def own_state(self) -> dict[int, Any]:
        return {
            i: {name: value for name, value in state.items() if name != "max_exp_avg_sq"}
            for i, state in super().own_state().items()
        }


@defect(cause="options", caught_by="test_options_changed_between_steps_hold")
class CopiesTheRateAlone(SimpleZero):
    """facebookresearch/fairscale#66: of the options that change, the rate alone reaches the ranks' own optimizers."""

    def taken(self, group: Group) -> Group:
        return {"lr": group["lr"]}


@defect(cause="options", caught_by="test_a_rate_in_a_tensor")
class CopiesARateInATensorOnce(SimpleZero):
    """deepspeedai/DeepSpeed#8202: a rate in a tensor is copied once, and changes of it in place do not arrive."""

    def taken(self, group: Group) -> Group:
        copies = self.__dict__.setdefault("copies", {})
        return {
            name: copies.setdefault(value, value.clone()) if isinstance(value, Tensor) else value
            for name, value in options(group).items()
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate  # the caller's own tensor, not the copy
        return loss


@defect(cause="state", caught_by="test_a_loaded_state_trains_on")
class SavesNothingOfTheInnerGroups(ShardedOptimizer):
    """deepspeedai/DeepSpeed#4396: does not save a step count in the inner optimizer's groups, as fused Adam has one."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = [set(group) for group in self.param_groups]
        loss = super().step(closure)
        for group, names in zip(self.param_groups, before, strict=True):
            for name in set(group) - names:
                del group[name]
        return loss


@defect(cause="options", caught_by="test_any_history")
class DropsGroupsWithoutParameters(SimpleZero):
    """MakazhanAlpamys/Soup#336: leaves out a group that has no parameters, and the next one takes its place."""

    def add_param_group(self, param_group: Group) -> None:
        if not isinstance(param_group["params"], list) or param_group["params"]:
            super().add_param_group(param_group)


@defect(cause="handles", caught_by="test_hooks_run_once_around_each_step")
class RunsHooksOfItsOwnPart(SimpleZero):
    """Runs a hook after the update of the rank's own parameters, when those of the others have not arrived."""

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)


@defect(cause="gradients", caught_by="test_a_sparse_gradient_is_right_or_refused")
class WritesSparseRows(SimpleZero):
    """Makes a sparse gradient dense by writing its rows; of two values of one row the last wins."""

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        for p in self.all_parameters:
            if p.grad is not None and p.grad.is_sparse:
                dense = p.new_zeros(p.shape)
                dense[p.grad._indices()[0]] = p.grad._values()
                p.grad = dense
        return loss


@defect(cause="state", caught_by="test_the_ids_of_a_state_are_those_of_its_groups")
class CountsParametersItself(SimpleZero):
    """pytorch/xla#9224: numbers a loaded state's parameters by itself, and does not read the ids in its groups."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        number = count()
        groups = [{**group, "params": [next(number) for _ in group["params"]]} for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})


@defect(cause="gradients", caught_by="test_every_rank_steps_where_a_gradient_is_not_finite")
class SkipsWhatIsNotFinite(SimpleZero):
    """NVIDIA/Megatron-LM#5331: a rank leaves out its update where its own gradients are not finite; the others step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        kept = [(p, p.grad) for group in self.inner.param_groups for p in group["params"]]
        if not all(gradient is None or gradient.isfinite().all() for _, gradient in kept):
            for p, _ in kept:
                p.grad = None
        loss = super().step(closure)
        for p, gradient in kept:
            p.grad = gradient
        return loss


@defect(cause="state", caught_by="test_a_state_has_the_names_of_parameters")
class DropsNames(SimpleZero):
    """Puts groups of the state together from options and numbers, without names."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for group in found["param_groups"]:
            group.pop("param_names", None)
        return found


@defect(cause="state", caught_by="test_parameters_may_be_changed_between_steps")
class KeepsMasters(SimpleZero):
    """NovaSky-AI/SkyRL#2149: parameters of 16 bits have masters, which write over what the caller has set."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        masters: dict[Tensor, Tensor] = self.__dict__.setdefault("masters", {})
        for p, master in masters.items():
            p.data.copy_(master)
        loss = super().step(closure)
        masters.update({p: p.detach().float() for p in self.all_parameters if p.dtype == torch.bfloat16})
        return loss


@defect(cause="state", caught_by="test_the_state_is_the_optimizers_own_on_every_rank")
class PassesOverEmptyGroups(ShardedOptimizer):
    """NVIDIA/TransformerEngine#1986: a param group of which the rank has nothing is not stepped, nor does it count."""

    def _add_inner_group(self, group: dict[str, Any], shards: list[Any]) -> None:
        own = self._optimizer_cls

        class Inner(own):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                groups, self.param_groups = self.param_groups, [each for each in self.param_groups if each["params"]]
                loss = super().step(closure)
                self.param_groups = groups
                return loss

        if self._inner is None:
            self._optimizer_cls = Inner
        super()._add_inner_group(group, shards)

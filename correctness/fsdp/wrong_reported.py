"""Planted defects: full sharding that is wrong as public trackers report."""

import random
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect
from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.units import Calls, Unit


@defect(cause="two calls", caught_by="test_each_model_has_its_own_compute_dtype")
class TheLastComputeDtypeHoldsForAll(SmallFSDP):
    """Keeps the compute dtype in the class: the last wrapper's holds for every other."""

    chosen: ClassVar[torch.dtype | None] = None

    def __init__(self, module: nn.Module, *, compute_dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(module, compute_dtype=compute_dtype, **options)
        type(self).chosen = compute_dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return type(self).chosen

    @compute_dtype.setter
    def compute_dtype(self, value: torch.dtype | None) -> None: ...


@defect(cause="numerics", caught_by="test_floating_point_inputs_are_cast")
class CastsComplexInputs(SmallFSDP):
    """tenstorrent/tt-metal#27426: casts what is no integer, and rotations lose their imaginary part."""

    def cast(self, x: Any) -> Any:
        inexact = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        return x.to(self.compute_dtype) if self.compute_dtype and inexact else x


@defect(cause="numerics", caught_by="test_what_is_not_finite_on_one_rank")
class HidesWhatIsNotFinite(SmallFSDP):
    """Makes numbers of what is not finite before it is reduced, and a loss scaler sees nothing."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient.nan_to_num())


@defect(cause="numerics", caught_by="test_what_is_not_finite_on_one_rank")
class ANormOfMinusOne(SmallFSDP):
    """Returns -1 for a norm that is not finite, as DeepSpeed does."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = super().clip_grad_norm_(max_norm)
        return norm if norm.isfinite() else torch.full_like(norm, -1)


@defect(cause="gradients", caught_by="test_backward_may_run_twice_after_one_forward")
class ReducesOncePerForward(SmallFSDP):
    """pytorch/pytorch#106637: what a second backward pass after a forward pass adds is lost."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for shard in self.module.parameters():
            shard.waiting = getattr(shard, "waiting", 0) + 1  # type: ignore[attr-defined]
        return super().forward(*args, **kwargs)

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        if shard.waiting:  # type: ignore[attr-defined]
            shard.waiting -= 1  # type: ignore[attr-defined]
            super().begin_reduce(shard, gradient)


@defect(cause="subgroup", caught_by="test_groups")
class DividesByTheDefaultGroup(SmallFSDP):
    """deepspeedai/DeepSpeed#6546: divides what a group has summed by the size of the default group."""

    def mean(self, total: Tensor) -> Tensor:
        return total / dist.get_world_size()


@defect(cause="world size", caught_by="test_any_history")
class DoublesOnOneRank(SmallFSDP):
    """NVIDIA/Megatron-LM#6660: in a group of one rank each further backward adds the sum so far to itself."""

    def add(self, shard: nn.Parameter, gradient: Tensor) -> None:
        if self.ranks == 1 and shard.grad is not None:
            shard.grad *= 2
        super().add(shard, gradient)


@defect(cause="state", caught_by="test_any_history")
class StaysGatheredUntilABackward(SmallFSDP):
    """pytorch/pytorch#137348: what no backward used stays gathered, and the next forward is of old weights."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        gathered = self.__dict__.setdefault("gathered", {})
        if shard not in gathered:
            gathered[shard] = super().gather_to_compute(shard)
        return gathered[shard].detach()

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.__dict__["gathered"].clear()
        super().begin_reduce(shard, gradient)


@defect(cause="memory", caught_by="test_full_parameters_are_freed_after_evaluation")
class WholeAfterEvaluation(SmallFSDP):
    """pytorch/pytorch#149029: what a forward without gradients gathered is freed by the next forward alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["gathered"] = None if torch.is_grad_enabled() else []
        return super().forward(*args, **kwargs)

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        if self.__dict__["gathered"] is not None:
            self.__dict__["gathered"].append(full)
        return full


@defect(cause="numerics", caught_by="test_gradients_of_several_passes_add_up_in_the_parameters_dtype")
class AddsUpInTheReduceDtype(SmallFSDP):
    """hiyouga/LlamaFactory#9769, deepspeedai/DeepSpeed#2768: gradients of several passes add up in bfloat16."""

    def add(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().add(shard, gradient)
        if shard.grad is not None:
            shard.grad = shard.grad.to(self.reduce_dtype or shard.dtype).to(shard.dtype)


@defect(cause="memory", caught_by="test_full_gradients_are_freed_as_backward_goes")
class WaitsForReductionsAtTheEnd(FullyShardedDataParallel):
    """ISEEKYAN/Megatron-LM#158: waits for all reductions at the end; until then each holds full gradients."""

    def _reduce(self, unit: Unit) -> None:
        unit.reshard()
        unit.finish_reduce()  # of an earlier call
        unit.begin_reduce()

    def _finish_backward(self) -> None:
        super()._finish_backward()
        for unit in self.units:
            unit.finish_reduce()


@defect(cause="two calls", caught_by="test_twenty_steps_equal_a_single_process")
class ReducesTheFirstOfTwoCalls(FullyShardedDataParallel):
    """facebookresearch/fairscale#513: reduces a module that runs twice after the first backward, and never again."""

    def _after_backward(self, unit: Unit, calls: Calls, gradients: Any) -> None:
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not unit.reduced:
            super()._reduce(unit)


@defect(cause="communication", caught_by="test_one_step_applies_the_mean")
class ReducesInAnOrderOfItsOwn(SmallFSDP):
    """NVIDIA/Megatron-LM#2218: gradients wait in a set, so that ranks reduce them in different orders."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.__dict__.setdefault("waiting", []).append((shard, gradient))

    def finish_gradient_synchronization(self) -> None:
        waiting = self.__dict__.pop("waiting", [])
        for shard, gradient in waiting[:: -1 if self.rank % 2 else 1]:
            super().begin_reduce(shard, gradient)
        super().finish_gradient_synchronization()


@defect(cause="numerics", caught_by="test_clipping")
class ClipsByItsOwnNorm(SmallFSDP):
    """pytorch/pytorch#72548: clips by the norm of the rank's own shards."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class FrozenUnitsStayGathered(FullyShardedDataParallel):
    """pytorch/xla#5484: full parameters of a unit that is all frozen are not freed after its backward."""

    def _reduce(self, unit: Unit) -> None:
        if any(flat.trainable for flat in unit.flats):
            super()._reduce(unit)
        else:
            unit.install_shards()

    def _finish_backward(self) -> None:
        units = self.units
        self.units = [unit for unit in units if any(flat.trainable for flat in unit.flats)]
        super()._finish_backward()
        self.units = units


@defect(cause="state", caught_by="test_the_random_state_is_the_callers")
class SeedsEachRankAlike(SmallFSDP):
    """Seeds the random generator for a common start: from then on all ranks draw the same dropout and data."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(module, **options)


@defect(cause="state", caught_by="test_the_random_state_is_the_callers")
class TagsAtRandom(SmallFSDP):
    """Draws a tag for its messages from Python's generator: data that is shuffled by it comes in another order."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.tag = random.getrandbits(32)
        super().__init__(module, **options)


@defect(cause="state", caught_by="test_tied")
class PadsTheSecondNameOnce(SmallFSDP):
    """pytorch/pytorch#176076: where ranks do not divide a tied parameter, its second name is gathered from a padded
    copy of the shard, which no update reaches.
    """

    def replace_parameters(self) -> None:
        super().replace_parameters()
        named, self.copies = self.named_shards(), {}
        for name in named.keys() - dict(self.module.named_parameters()).keys():
            if self.shapes[named[name]].numel() % self.ranks:
                self.copies[name] = named[name].detach().clone()

    def by_name(self, full: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        found = super().by_name(full)
        for name in sorted(self.copies):
            stale = self.gather(self.copies[name], found[name].shape, found[name].dtype)
            found[name] = found[name] + (stale - found[name]).detach()
        return found


@defect(cause="gradients", caught_by="test_what_comes_before_has_its_gradients_through_the_cast")
class CastsBesideAutograd(SmallFSDP):
    """pytorch/pytorch#90921: inputs are cast where no gradients are made, and marked as requiring them."""

    def cast(self, x: Any) -> Any:
        if self.compute_dtype is None or not isinstance(x, Tensor):
            return x
        with torch.no_grad():
            found = super().cast(x)
        return found if found is x else found.requires_grad_(x.requires_grad)


@defect(cause="options", caught_by="test_reduce_dtype_is_what_gradients_are_communicated_in")
class DtypesOfTheFirstPass(SmallFSDP):
    """pytorch/pytorch#186998: dtypes are chosen in the first pass, and none for gradients if it makes none."""

    chosen = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.chosen:
            self.chosen = True
            if not torch.is_grad_enabled():
                self.reduce_dtype = self.compute_dtype
        return super().forward(*args, **kwargs)


@defect(cause="two calls", caught_by="test_containers_keep_their_classes")
class PlainDicts(SmallFSDP):
    """facebookresearch/fairscale#876: containers are built anew, and a subclass of dict is a dict afterwards."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return dict(out) if isinstance(out, dict) else out


@defect(cause="numerics", caught_by="test_weights_that_are_written_by_data_are_read")
class CastsOnceForEachVersion(SmallFSDP):
    """sgl-project/sglang#30247: casts are kept by the shard's version, which writes by `.data` do not change."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        version, cast = kept.get(shard, (None, None))
        if version != shard._version:
            version, cast = kept[shard] = shard._version, super().gather_to_compute(shard).detach()
        return cast

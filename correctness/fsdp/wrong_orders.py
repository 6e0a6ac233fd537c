"""Planted defects that need random histories, another default dtype, a parameter with one element, very many, or
replicated parameters to show."""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect
from impl.collectives import Handle
from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.flat_parameters import Replicated
from impl.fsdp.units import Unit

HISTORIES = "test_any_history"


@defect(cause="gradients", caught_by=HISTORIES)
class CastsInputsWithoutGradient(FullyShardedDataParallel):
    """Inputs of another dtype than `compute_dtype` get no gradient."""

    @torch.no_grad()
    def _cast(self, x: Any) -> Any:
        return super()._cast(x)


@defect(cause="options", caught_by=HISTORIES)
class CastsBuffers(FullyShardedDataParallel):
    """facebookresearch/fairscale#442, facebookresearch/fairscale#449: keeps buffers in `compute_dtype`, though it is
    for parameters and inputs."""

    def __init__(self, module: nn.Module, *, compute_dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(module, compute_dtype=compute_dtype, **options)
        for buffer in module.buffers():
            if compute_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.data.to(compute_dtype)


@defect(cause="communication", caught_by=HISTORIES)
class SkipsUnitsWithoutGradients(FullyShardedDataParallel):
    """pytorch/pytorch#158719: skips the reduce-scatter of a unit without a gradient on this rank; another rank waits in
    it."""

    def _reduce(self, unit: Unit) -> None:
        if unit.has_gradients:
            super()._reduce(unit)
        else:
            unit.reshard()


@defect(cause="shapes", caught_by="test_clipping_is_by_the_norm_over_all_ranks")
class EmptyRanksDoNotClip(FullyShardedDataParallel):
    """A rank with empty shards skips the all-reduce of the norm; the others wait."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if all(p.grad is None or not p.grad.numel() for p in self._trainable()):
            return torch.zeros(())
        return super().clip_grad_norm_(max_norm)


@defect(cause="numerics", caught_by="test_a_norm_whose_square_float16_lacks_is_a_number")
class SquaresInHalfPrecision(FullyShardedDataParallel):
    """Computes the norm as PyTorch's clip_grad_norm_ does for DTensors."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        gradients = [p.grad for p in self._trainable() if p.grad is not None]
        total = torch.zeros((), dtype=gradients[0].dtype)
        for gradient in gradients:
            total += torch.linalg.vector_norm(gradient).square()
        dist.all_reduce(total, group=self.process_group)
        norm = total.sqrt()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


NONE_IS_LEFT = "test_no_gradient_is_left_of_any_number"


@defect(cause="shapes", caught_by=NONE_IS_LEFT)
class LosesABucketOfOne(SmallFSDP):
    """Loses the last bucket of 32 parameters if it has only one."""

    def finish_gradient_synchronization(self) -> None:
        if len(self.pending) > 32 and len(self.pending) % 32 == 1:
            self.wait(self.pending.pop()[2])
        super().finish_gradient_synchronization()


@defect(cause="handles", caught_by=NONE_IS_LEFT)
class ReducesAtMost32Units(FullyShardedDataParallel):
    def _reduce(self, unit: Unit) -> None:
        if unit in self.units[:32]:
            super()._reduce(unit)
        else:
            unit.reshard()


@defect(cause="options", caught_by="test_floating_point_inputs_are_cast")
class CastsSequencesAlone(SmallFSDP):
    """Does not cast tensors in dicts, nor in dicts inside tuples."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = {id(x) for each in (*args, *kwargs.values()) if isinstance(each, dict) for x in each.values()}
        return super().forward(*args, **kwargs)

    def cast(self, x: Any) -> Any:
        return x if id(x) in self.kept else super().cast(x)


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class GathersForTheNextStep(FullyShardedDataParallel):
    """All-gathers the first layer before the optimizer's step, so the result is stale."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for flat in next(unit for unit in self.units if unit.flats).flats:
            flat.begin_gather()
            flat.finish_gather()


class _ReplicatesOtherwise(FullyShardedDataParallel):
    KIND: type[Replicated] = Replicated

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for unit in self.units:
            for flat in unit.flats:
                if isinstance(flat, Replicated):
                    flat.__class__ = self.KIND


class _KeepsItsOwn(Replicated):
    def _sum(self, gradient: Tensor) -> Handle | None:
        handle = super()._sum(gradient.clone())
        gradient.mul_(self.sharding.world_size)
        return handle


class _Sums(Replicated):
    def _sum(self, gradient: Tensor) -> Handle | None:
        return super()._sum(gradient.mul_(self.sharding.world_size))


class _CountsOnEveryRank(Replicated):
    @property
    def counted(self) -> bool:
        return True


REPLICATED = "test_replicated_parameters_train_as_in_a_single_process"


@defect(cause="gradients", caught_by=REPLICATED)
class DoesNotAverageWhatIsIgnored(_ReplicatesOtherwise):
    """Does not average gradients of `ignored_params`, as PyTorch's `fully_shard` does not."""

    KIND = _KeepsItsOwn


@defect(cause="world size", caught_by=REPLICATED)
class SumsWhatIsIgnored(_ReplicatesOtherwise):
    KIND = _Sums


@defect(cause="options", caught_by="test_a_gradient_that_every_rank_has_counts_once_in_the_norm")
class CountsWhatIsIgnoredOnEveryRank(_ReplicatesOtherwise):
    """pytorch/pytorch#88955: counts replicated parameters once per rank in the norm."""

    KIND = _CountsOnEveryRank


@defect(cause="communication", caught_by=REPLICATED)
class StartsWhatIsIgnoredFromOwnWeights(FullyShardedDataParallel):
    """Keeps each rank's own values of `ignored_params`: nothing broadcasts them."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        own = {parameter: parameter.detach().clone() for parameter in module.parameters()}
        super().__init__(module, **options)
        for parameter, value in own.items():
            if parameter.shape == value.shape and parameter.ndim == 1:
                parameter.data.copy_(value)


@defect(cause="numerics", caught_by="test_another_default_dtype")
class GathersInTheDefaultDtype(SmallFSDP):
    """A buffer for float32 has torch's default dtype."""

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        if dtype is not None or shard.dtype != torch.float32:
            return super().gather(shard, shape, dtype)
        return super().gather(shard, shape, torch.get_default_dtype()).float()


@defect(cause="numerics", caught_by="test_parameters_of_two_dtypes_keep_theirs_or_are_an_error")
class GathersInTheFirstDtype(SmallFSDP):
    """Parameters are gathered for a pass in one buffer, of the dtype that the first of them has."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        first = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        return full.to(first).to(full.dtype) if full.is_floating_point() else full


@defect(cause="gradients", caught_by="test_parameters_of_two_dtypes_keep_theirs_or_are_an_error")
class MakesViewsByTheirStrides(SmallFSDP):
    """Backward makes the views that forward has saved anew, by sizes and strides: a conjugate is not one of these."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.gathered: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        with saved_tensors_hooks(self.pack, self.unpack):
            return super().forward(*args, **kwargs)

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        self.gathered[full.untyped_storage()._cdata] = full
        return full

    def pack(self, x: Tensor) -> Any:
        full = self.gathered.get(x.untyped_storage()._cdata)
        return x if full is None or x.dtype != full.dtype else (full, x.size(), x.stride(), x.storage_offset())

    def unpack(self, saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved[0].detach().as_strided(*saved[1:])


@defect(cause="gradients", caught_by="test_in_low_precision_one_of_two_passes_may_use_a_parameter")
class AccumulatesInTheReduceDtype(FullyShardedDataParallel):
    """pytorch/pytorch#160279: gradients of several passes add up in `reduce_dtype`, one of a single pass keeps the
    compute dtype, and both are to be reduced in one message."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for unit in self.units:
            for flat in unit.flats:
                flat._gradients = _Upcast(flat._reduce_dtype)


class _Upcast(dict[int, Tensor]):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __setitem__(self, index: int, gradient: Tensor) -> None:
        super().__setitem__(index, gradient.to(self.dtype) if index in self else gradient)

    def pop(self, index: int) -> Tensor:  # type: ignore[override]
        if len(dtypes := {gradient.dtype for gradient in self.values()}) > 1:
            raise AssertionError(f"gradients of {dtypes} are not reduced together")
        return super().pop(index)

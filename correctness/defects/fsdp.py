"""Wrong full sharding: each has one mistake that somebody makes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.planting import defect
from correctness.support.small_fsdp import SmallFSDP
from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.units import Flat


@defect(cause="communication", caught_by="test_every_rank_starts_from_rank_0s_parameters")
class StartsFromOwnWeights(SmallFSDP):
    """Each rank cuts its shard from its own random weights."""

    def synchronize_start(self) -> None:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts_with_rank_0s_buffers")
class LeavesBuffers(SmallFSDP):
    def synchronize_start(self) -> None:
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)


@defect(cause="world size", caught_by="test_one_step_applies_the_mean")
class DividesByTwo(SmallFSDP):
    def mean(self, total: Tensor) -> Tensor:
        return total / 2 if self.ranks > 1 else total


@defect(cause="shapes", caught_by="test_one_step_applies_the_mean")
class DropsTheRemainder(SmallFSDP):
    """The gradient of what does not divide by the ranks is cut off."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        even = gradient.numel() // self.ranks * self.ranks
        flat = gradient.flatten().clone()
        flat[even:] = 0
        super().begin_reduce(shard, flat)


@defect(cause="shapes", caught_by="test_one_step_applies_the_mean")
class LosesTheEndOfLargeParameters(SmallFSDP):
    """Sends large gradients in pieces of 100,000 elements, and forgets the last, which is shorter."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        if gradient.numel() > 100_000:
            gradient = gradient.flatten().clone()
            gradient[gradient.numel() // 100_000 * 100_000 :] = 0
        super().begin_reduce(shard, gradient)


@defect(cause="subgroup", caught_by="test_groups")
class ReducesOverTheWorld(SmallFSDP):
    def mean(self, total: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total / dist.get_world_size() * dist.get_world_size(self.group) / self.ranks


@defect(cause="subgroup", caught_by="test_groups")
class SourceIsGlobalRankZero(SmallFSDP):
    def synchronize_start(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), src=0, group=self.group)


@defect(cause="options", caught_by="test_compute_dtype_is")
class ComputesInStoredDtype(SmallFSDP):
    """Casts the inputs and the output, and multiplies in float32."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        return self.gather(shard, self.shapes[shard], None)

    def cast(self, x: Any) -> Any:
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return SmallFSDP.cast(self, output)


@defect(cause="options", caught_by="test_reduce_dtype_is")
class ReducesInComputeDtype(SmallFSDP):
    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.reduce_dtype = self.compute_dtype
        super().begin_reduce(shard, gradient)


@defect(cause="numerics", caught_by="test_parameters_are_kept_in_their_own_dtype")
class GathersRoundedParameters(SmallFSDP):
    """`gather_full_parameters` casts what computes, not what is stored."""

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = {p: self.gather_to_compute(p).to(p.dtype) for p in self.module.parameters()}
        return {name: full[p].clone() for name, p in self.named_shards().items()}


@defect(cause="two calls", caught_by="test_gathered_parameters_are_copies")
class GathersIntoOneBuffer(SmallFSDP):
    """What is gathered for a look is the memory that the next gather writes."""

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        if not hasattr(self, "buffers_by_shape"):
            self.buffers_by_shape: dict[Any, Tensor] = {}
        full = super().gather(shard, shape, dtype)
        if dtype is not None or torch.is_grad_enabled():
            return full
        return self.buffers_by_shape.setdefault(id(shard), full).copy_(full)

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        return {name: self.gather(p, self.shapes[p], None) for name, p in self.named_shards().items()}


@defect(cause="state", caught_by="test_names")
class ForgetsDeepNames(SmallFSDP):
    """Takes its own `module.` out of the names, wherever it stands."""

    def gather_full_parameters(self) -> dict[str, Tensor]:
        return {name.replace("module.", ""): full for name, full in super().gather_full_parameters().items()}


@defect(cause="state", caught_by="test_tied")
class NamesTiedParametersOnce(SmallFSDP):
    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = super().gather_full_parameters()
        return {name: full[name] for name, _ in self.module.named_parameters()}


@defect(cause="gradients", caught_by="test_tied")
class Unties(SmallFSDP):
    """A shard for each place that a parameter has."""

    def replace_parameters(self) -> None:
        self.shapes = {}
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    shard = nn.Parameter(self.shard_of(parameter.detach()), requires_grad=parameter.requires_grad)
                    self.shapes[shard] = parameter.shape
                    part._parameters[name] = shard


@defect(cause="gradients", caught_by="test_frozen")
class ZeroGradientsForFrozen(SmallFSDP):
    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@defect(cause="gradients", caught_by="test_frozen")
class TrainsFrozen(SmallFSDP):
    """All shards are parameters that require a gradient."""

    def replace_parameters(self) -> None:
        self.module.requires_grad_(True)
        super().replace_parameters()


@defect(cause="gradients", caught_by="test_each_gradient_has_the_shape_and_dtype")
class GradientsInReduceDtype(SmallFSDP):
    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.grad is not None and self.reduce_dtype is not None:
                gradient, parameter.grad = parameter.grad.to(self.reduce_dtype), None
                parameter.grad_dtype = None
                parameter.grad = gradient


@defect(cause="gradients", caught_by="test_several_backward_passes")
class KeepsTheLastBackward(SmallFSDP):
    """A second backward before the synchronization takes the place of the first."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient)
        latest = {id(p): (p, total, handle) for p, total, handle in self.pending}
        self.pending = list(latest.values())


@defect(cause="gradients", caught_by="test_gradients_add_up_until_zero_grad")
class OverwritesGradients(SmallFSDP):
    """Where `.grad` is there already it is replaced, unless by a backward of the same step."""

    def finish_gradient_synchronization(self) -> None:
        for shard, _, _ in self.pending:
            shard.grad = None
        super().finish_gradient_synchronization()


@defect(cause="state", caught_by="test_zero_grad_leaves_nothing")
class SumsOfItsOwn(SmallFSDP):
    """Sums gradients in a buffer of its own, which no optimizer's zero_grad() sees."""

    sums: dict[nn.Parameter, Tensor]

    def add(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.__dict__.setdefault("sums", {})
        self.sums[shard] = self.sums[shard] + gradient if shard in self.sums else gradient
        shard.grad = self.sums[shard].clone()


@defect(cause="two calls", caught_by="test_two_forwards")
class OneGradientBuffer(SmallFSDP):
    """The buffers that gradients are reduced into are made once for a shape."""

    totals: ClassVar[dict[Any, Tensor]] = {}

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient)
        _, total, handle = self.pending[-1]
        handle.wait()
        static = self.totals.setdefault((total.shape, total.dtype, total.device, id(shard)), torch.empty_like(total))
        self.pending[-1] = shard, static.copy_(total), handle


@defect(cause="two calls", caught_by="test_two_models")
class CacheOfTheClass(SmallFSDP):
    """Full parameters go into buffers that all models share, one a shape."""

    cache: ClassVar[dict[Any, Tensor]] = {}

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        full = super().gather(shard, shape, dtype)
        if not torch.is_grad_enabled():  # within an autograd.Function
            index = [id(p) for p in self.shapes].index(id(shard))
            key = (index, full.shape, full.dtype, full.device)
            full = self.cache.setdefault(key, torch.empty_like(full)).data.copy_(full)
        return full


@defect(cause="memory", caught_by="test_each_rank_stores_its_share")
class ShardsAreViews(SmallFSDP):
    """Each shard is a view that keeps the full parameter's memory."""

    def shard_of(self, full: Tensor) -> Tensor:
        return self.padded(full).chunk(self.ranks)[self.rank]


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class KeepsFullParameters(SmallFSDP):
    """What the last forward gathered stays until the next."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        self.__dict__.setdefault("last", {})[shard] = full
        return full


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class KeepsUnitsGathered(FullyShardedDataParallel):
    """Ours, whose `reshard` puts the shards back and frees nothing."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for unit in self.units:
            unit.reshard = unit.install_shards  # type: ignore[method-assign]
            for flat in unit.flats:
                flat.begin_gather = _gather_again.__get__(flat)  # type: ignore[method-assign]


def _gather_again(flat: Flat) -> None:
    """Gather into the memory that is still there."""
    flat._flat.untyped_storage().resize_(0)
    Flat.begin_gather(flat)


@defect(cause="communication", caught_by="test_one_step_applies_the_mean")
class LeavesSmallGradients(SmallFSDP):
    """Communicates only what is worth it: of vectors each rank takes its own gradient."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        if gradient.ndim > 1:
            super().begin_reduce(shard, gradient)
            return
        handle = dist.barrier(group=self.group, async_op=True)
        self.pending.append((shard, self.shard_of(gradient.to(shard.dtype)) * self.ranks, handle))


@defect(cause="handles", caught_by="test_collectives_may_be_slow")
class DoesNotWait(SmallFSDP):
    """Takes the reduced gradients without waiting for them."""

    def wait(self, handle: Any) -> None:
        self.__dict__.setdefault("forgotten", []).append(handle)


@defect(cause="handles", caught_by="test_collectives_may_be_slow")
class DoesNotWaitForGathers(SmallFSDP):
    """Uses a gathered parameter while it arrives."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        own = shard.detach().to(self.compute_dtype or shard.dtype)
        flat = own.new_zeros(self.ranks * len(own))
        handle = dist.all_gather_into_tensor(flat, own, group=self.group, async_op=True)
        self.__dict__.setdefault("forgotten", []).append(handle)
        return flat[: self.shapes[shard].numel()].view(self.shapes[shard])


@defect(cause="gradients", caught_by="test_an_unused_parameter")
class LastGradientOfUnused(SmallFSDP):
    """A parameter without a gradient gets that of the last step again."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        latest = self.__dict__.setdefault("latest", {})
        if not gradient.any() and shard in latest:
            gradient = latest[shard]
        latest[shard] = gradient
        super().begin_reduce(shard, gradient)


@defect(cause="gradients", caught_by="test_a_parameter_that_one_rank")
class MeanOfThoseThatHaveOne(SmallFSDP):
    """Divides by the ranks that have a gradient, not by all."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        have = gradient.any().to(torch.float32)
        dist.all_reduce(have, group=self.group)
        super().begin_reduce(shard, gradient * (self.ranks / max(have.item(), 1)))


@defect(cause="state", caught_by="test_training_goes_on_after_evaluation")
class RemembersEvaluation(SmallFSDP):
    """Gathers once for evaluation, and does not notice that training goes on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if "evaluated" not in self.__dict__:
            self.__dict__["evaluated"] = self.gather_full_parameters()
        return torch.func.functional_call(self.module, self.__dict__["evaluated"], args, kwargs)


@defect(cause="state", caught_by="test_a_state_dict_loaded")
class KeepsMasterShards(SmallFSDP):
    """Gathers copies of the shards, which the optimizer's steps write and `load_state_dict` does not."""

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        masters = self.__dict__.setdefault("masters", {})
        if shard not in masters or shard.grad is not None:
            masters[shard] = shard.detach().clone()
        return super().gather(masters[shard], shape, dtype)


@defect(cause="gradients", caught_by="test_an_inputs_gradient")
class DetachesInputs(SmallFSDP):
    def cast(self, x: Any) -> Any:
        x = super().cast(x)
        return x.detach() if isinstance(x, Tensor) else x


@defect(cause="numerics", caught_by="test_clipping")
class ClipsByItsOwnNorm(SmallFSDP):
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


@defect(cause="errors", caught_by="test_ranks_with_different_modules")
class AcceptsDifferentModules(SmallFSDP):
    """Compares only how many parameters there are."""

    def check(self, module: nn.Module) -> None:
        if any("_is_sharded" in vars(part) for part in module.modules()):
            raise ValueError("sharded already")
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("nothing to train")


@defect(cause="errors", caught_by="test_a_wrapper_is_not_wrapped_again")
class ShardsTwice(SmallFSDP):
    def check(self, module: nn.Module) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("nothing to train")


@defect(cause="errors", caught_by="test_a_module_with_nothing_to_train")
class AcceptsNothingToTrain(SmallFSDP):
    def check(self, module: nn.Module) -> None:
        if any(p.requires_grad for p in module.parameters()):
            super().check(module)


@defect(cause="state", caught_by="test_modules_keep_their_classes")
class ReplacesLinears(SmallFSDP):
    """Puts modules of its own in place of the linears."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for part in list(module.modules()):
            for name, child in part.named_children():
                if type(child) is nn.Linear:
                    own = _Linear()
                    own._parameters.update(child._parameters)
                    setattr(part, name, own)


class _Linear(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)  # type: ignore[arg-type]

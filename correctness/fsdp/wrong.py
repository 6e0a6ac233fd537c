"""Planted defects: full sharding with one common mistake each."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import defect


@defect(cause="communication", caught_by="test_every_rank_starts_from_rank_0s_parameters")
class StartsFromOwnWeights(SmallFSDP):
    """Each rank cuts its shard from its own random weights."""

    def synchronize_start(self) -> None:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts_with_rank_0s_buffers")
class LeavesBuffers(SmallFSDP):
    """pytorch/pytorch#178569: sends the first rank's parameters to the others, and leaves buffers as they were."""

    def synchronize_start(self) -> None:
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)


@defect(cause="world size", caught_by="test_one_step_applies_the_mean")
class DividesByTwo(SmallFSDP):
    def mean(self, total: Tensor) -> Tensor:
        return total / 2 if self.ranks > 1 else total


@defect(cause="shapes", caught_by="test_one_step_applies_the_mean")
class DropsTheRemainder(SmallFSDP):
    """Drops the part of a gradient that does not divide by the ranks."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        even = gradient.numel() // self.ranks * self.ranks
        flat = gradient.flatten().clone()
        flat[even:] = 0
        super().begin_reduce(shard, flat)


@defect(cause="shapes", caught_by="test_one_step_applies_the_mean")
class LosesTheEndOfLargeParameters(SmallFSDP):
    """Sends large gradients in pieces of 100,000 elements, and drops the last, shorter piece."""

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
    """pytorch/pytorch#190626: reduces gradients in the compute dtype, whatever `reduce_dtype` asks for."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.reduce_dtype = self.compute_dtype
        super().begin_reduce(shard, gradient)


@defect(cause="numerics", caught_by="test_parameters_and_buffers_are_kept_in_their_own_dtype")
class GathersRoundedParameters(SmallFSDP):
    """facebookresearch/fairscale#445: `gather_full_parameters` returns parameters rounded to the compute dtype."""

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = {p: self.gather_to_compute(p).to(p.dtype) for p in self.module.parameters()}
        return {name: full[p].clone() for name, p in self.named_shards().items()}


@defect(cause="two calls", caught_by="test_gathered_parameters_are_copies")
class GathersIntoOneBuffer(SmallFSDP):
    """Each `gather_full_parameters` overwrites the result of the one before."""

    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = super().gather_full_parameters()
        buffers = self.__dict__.setdefault("buffers_of_the_last", full)
        return {name: buffers[name].copy_(value) for name, value in full.items()}


@defect(cause="state", caught_by="test_names")
class ForgetsDeepNames(SmallFSDP):
    """Removes `module.` from names wherever it occurs."""

    def gather_full_parameters(self) -> dict[str, Tensor]:
        return {name.replace("module.", ""): full for name, full in super().gather_full_parameters().items()}


@defect(cause="state", caught_by="test_tied")
class NamesTiedParametersOnce(SmallFSDP):
    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = super().gather_full_parameters()
        return {name: full[name] for name, _ in self.module.named_parameters()}


@defect(cause="gradients", caught_by="test_tied")
class Unties(SmallFSDP):
    """NVIDIA-NeMo/RL#227: makes a shard for each name of a tied parameter."""

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
    """facebookresearch/fairscale#721: frozen parameters get gradients as those do that are kept with them."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


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
    """facebookresearch/fairscale#784: a second backward before synchronization replaces the first one's gradients."""

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient)
        latest = {id(p): (p, total, handle) for p, total, handle in self.pending}
        self.pending = list(latest.values())


@defect(cause="state", caught_by="test_zero_grad_leaves_nothing")
class SumsOfItsOwn(SmallFSDP):
    """Accumulates gradients in a buffer that `zero_grad()` does not clear."""

    sums: dict[nn.Parameter, Tensor]

    def add(self, shard: nn.Parameter, gradient: Tensor) -> None:
        self.__dict__.setdefault("sums", {})
        self.sums[shard] = self.sums[shard] + gradient if shard in self.sums else gradient
        shard.grad = self.sums[shard].clone()


@defect(cause="two calls", caught_by="test_two_models")
class CacheOfTheClass(SmallFSDP):
    """All models share one buffer of full parameters for each shape."""

    cache: ClassVar[dict[Any, Tensor]] = {}

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        full = super().gather(shard, shape, dtype)
        if not torch.is_grad_enabled():  # inside an autograd.Function
            index = [id(p) for p in self.shapes].index(id(shard))
            key = (index, full.shape, full.dtype, full.device)
            full = self.cache.setdefault(key, torch.empty_like(full)).data.copy_(full)
        return full


@defect(cause="memory", caught_by="test_each_rank_stores_its_share")
class ShardsAreViews(SmallFSDP):
    """Each shard is a view that keeps the full parameter's memory."""

    def shard_of(self, full: Tensor) -> Tensor:
        return self.padded(full).chunk(self.ranks)[self.rank]


@defect(cause="memory", caught_by="test_shards_and_their_gradients")
class GradientsAreViews(SmallFSDP):
    def mean(self, total: Tensor) -> Tensor:
        return total.new_zeros(self.ranks, len(total)).copy_(total / self.ranks)[self.rank]


@defect(cause="memory", caught_by="test_after_a_step_only_shards_are_left")
class KeepsFullParameters(SmallFSDP):
    """Keeps full parameters after forward."""

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        full = super().gather_to_compute(shard)
        self.__dict__.setdefault("last", {})[shard] = full
        return full


@defect(cause="handles", caught_by="test_collectives_may_be_slow")
class DoesNotWait(SmallFSDP):
    """Takes the reduced gradients without waiting for them."""

    def wait(self, handle: Any) -> None:
        self.__dict__.setdefault("forgotten", []).append(handle)


@defect(cause="gradients", caught_by="test_an_unused_parameter")
class LastGradientOfUnused(SmallFSDP):
    """An unused parameter gets the last step's gradient again."""

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
    """Caches the parameters gathered for the first evaluation, and misses later training."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if "evaluated" not in self.__dict__:
            self.__dict__["evaluated"] = self.gather_full_parameters()
        return torch.func.functional_call(self.module, self.__dict__["evaluated"], args, kwargs)


@defect(cause="state", caught_by="test_a_state_dict_loaded")
class KeepsMasterShards(SmallFSDP):
    """Gathers from copies of the shards, which `load_state_dict` does not update."""

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


@defect(cause="errors", caught_by="test_ranks_with_different_modules")
class ComparesNumbersOfElements(SmallFSDP):
    """Takes (6, 2) and (4, 3) for the same shape, as both have 12 elements."""

    def check(self, module: nn.Module) -> None:
        flat = nn.Module()
        for name, p in module.named_parameters():
            flat.register_parameter(name.replace(".", "-"), nn.Parameter(p.detach().flatten(), p.requires_grad))
        super().check(flat)

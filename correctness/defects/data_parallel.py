"""Wrong data-parallel wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.planting import defect
from correctness.support.wrappers import Overlapped, Plain

# World size


@defect(cause="world size", caught_by="test_gradients_are_the_average")
class HalvesTheSum(Plain):
    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(2)


@defect(cause="world size", caught_by="test_gradients_are_the_average")
class AddsOneNeighbour(Plain):
    """A ring of one step: right on two ranks."""

    def reduce(self, gradient: Tensor) -> None:
        rank = dist.get_rank(self.group)
        everyone = [torch.empty_like(gradient) for _ in range(self.size)]
        dist.all_gather(everyone, gradient, group=self.group)
        neighbours = {rank, (rank + 1) % self.size}
        gradient.copy_(torch.stack([everyone[i] for i in neighbours]).sum(0) / self.size)


# Shapes


@defect(cause="shapes", caught_by="test_gradients_of_any_shape")
class FlattensIntoACopy(Plain):
    """`flatten` copies what is not contiguous, and the copy is averaged."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.reduce(p.grad.flatten())


@defect(cause="shapes", caught_by="test_gradients_of_large_parameters")
class LosesTheTailOfLargeGradients(Plain):
    """Cuts what is larger than 1 MiB into equal pieces, and forgets what is left."""

    def reduce(self, gradient: Tensor) -> None:
        flat = gradient.view(-1)
        pieces = max(1, flat.nbytes // 2**20)
        each = flat.numel() // pieces
        for i in range(pieces):
            super().reduce(flat[i * each : (i + 1) * each])


@defect(cause="shapes", caught_by="test_gradients_of_large_parameters")
class SkipsWhatDoesNotFitABucket(Plain):
    """A parameter larger than a bucket of 1 MiB goes into none."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average([p for p in parameters if p.nbytes <= 2**20])


# Numerics


@defect(cause="numerics", caught_by="test_gradients_are_reduced_in_their_own_precision")
class SendsBfloat16(Plain):
    def reduce(self, gradient: Tensor) -> None:
        narrow = gradient.bfloat16()
        super().reduce(narrow)
        gradient.copy_(narrow)


@defect(cause="numerics", caught_by="test_gradients_are_reduced_in_their_own_precision")
class SendsFloat32(Plain):
    def reduce(self, gradient: Tensor) -> None:
        single = gradient.float()
        super().reduce(single)
        gradient.copy_(single)


@defect(cause="numerics", caught_by="test_gradients_are_reduced_in_their_own_precision")
class SendsLargeGradientsInBfloat16(SendsBfloat16):
    def reduce(self, gradient: Tensor) -> None:
        (super() if gradient.numel() > 100_000 else super(SendsBfloat16, self)).reduce(gradient)


@defect(cause="numerics", caught_by="test_what_is_not_finite")
class HidesInfinities(Plain):
    def reduce(self, gradient: Tensor) -> None:
        super().reduce(gradient.nan_to_num_())


@defect(cause="numerics", caught_by="test_gradients_are_the_same_on_every_rank")
class AddsItsOwnFirst(Plain):
    """Every rank adds in another order, so the ranks' parameters drift apart."""

    def reduce(self, gradient: Tensor) -> None:
        rank = dist.get_rank(self.group)
        everyone = [torch.empty_like(gradient) for _ in range(self.size)]
        dist.all_gather(everyone, gradient, group=self.group)
        for i in range(1, self.size):
            gradient.add_(everyone[(rank + i) % self.size])
        gradient.div_(self.size)


# Two models, two forward passes


@defect(cause="two calls", caught_by="test_two_models")
class SharesBuffersBetweenModels(Plain):
    """The gradients of one shape share one buffer."""

    buffers_by_shape: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average(parameters)
        for i, p in enumerate(parameters):
            key = (i, *p.shape, p.dtype)
            buffer = self.buffers_by_shape.setdefault(key, torch.empty_like(p))
            p.grad = buffer.copy_(p.grad)


@defect(cause="two calls", caught_by="test_two_models")
class SharesItsListOfHandles(Overlapped):
    shared: ClassVar[list[Any]] = []

    def start(self) -> None:
        super().start()
        self.handles = self.shared


@defect(cause="two calls", caught_by="test_two_forward_passes")
class AveragesOnceForEachForward(Plain):
    """Counts forward passes, and averages when as many backward passes are done."""

    pending = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.pending += 1
        return super().forward(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        self.pending -= self.synchronizing
        if self.pending <= 0:
            super().finish_gradient_synchronization()
            self.pending = 0


# Subgroups


@defect(cause="subgroup", caught_by="test_only_the_ranks_of_the_process_group")
class IgnoresTheGroup(Plain):
    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


@defect(cause="subgroup", caught_by="test_only_the_ranks_of_the_process_group")
class DividesByTheWorld(Plain):
    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(dist.get_world_size())


@defect(cause="subgroup", caught_by="test_only_the_ranks_of_the_process_group")
class BroadcastsFromTheWorldsRank0(Plain):
    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


@defect(cause="subgroup", caught_by="test_a_rank_outside_the_process_group")
class StartsWithABarrierOfTheWorld(Plain):
    def start(self) -> None:
        dist.barrier()
        super().start()


@defect(cause="subgroup", caught_by="test_each_model_keeps_its_own_process_group")
class KeepsTheLatestGroup(Plain):
    """In the class, where the next model finds its own."""

    latest: ClassVar[Any] = None

    def start(self) -> None:
        type(self).latest = self.group
        super().start()

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.latest)
        gradient.div_(dist.get_world_size(self.latest))


# State


@defect(cause="state", caught_by="test_every_rank_starts")
class KeepsItsOwnBuffers(Plain):
    def start(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class KeepsItsOwnFrozenParameters(Plain):
    def start(self) -> None:
        for tensor in chain((p for p in self.module.parameters() if p.requires_grad), self.module.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsFromTheStateDict(Plain):
    """Which has no buffers that are not persistent."""

    def start(self) -> None:
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsInFloat32(Plain):
    @torch.no_grad()
    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            single = tensor.float()
            dist.broadcast(single, group=self.group, group_src=0)
            tensor.copy_(single)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsFromTheAverage(Plain):
    def start(self) -> None:
        super().start()
        for p in self.module.parameters():
            p.data.add_(dist.get_rank(self.group))
            self.reduce(p.data)


@defect(cause="state", caught_by="test_buffers_that_forward_changes")
class BroadcastsBuffersAgain(Plain):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)
        return super().forward(*args, **kwargs)


@defect(cause="state", caught_by="test_the_state_dict")
class PrefixesItsState(Plain):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return nn.Module.state_dict(self, *args, **kwargs)


@defect(cause="state", caught_by="test_a_parameter_that_no_rank_uses")
class ReducesTheLastStepsGradient(Plain):
    """Of a parameter without a gradient, its buffer is reduced as the last step left it."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        self.last = getattr(self, "last", {})
        for p in parameters:
            if p.grad is None:
                p.grad = self.last.get(p, torch.zeros_like(p)).clone()
        super().average(parameters)
        self.last = {p: p.grad.clone() for p in parameters}


@defect(cause="state", caught_by="test_modules_work_as_before")
class DropsKeywords(Plain):
    def forward(self, *args: Any) -> Any:
        return self.module(*args)


# Options


@defect(cause="options", caught_by="test_bucket_mb")
class IgnoresBucketMb(Plain):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        super().__init__(module, process_group=process_group)


class Bucketed(Plain):
    """One all-reduce for each run of parameters of one dtype that fits into `limit` bytes."""

    limit = 25.0 * 2**20

    def average(self, parameters: list[nn.Parameter]) -> None:
        bucket: list[nn.Parameter] = []
        for p in parameters:
            if bucket and (sum(q.nbytes for q in bucket) + p.nbytes > self.limit or p.dtype != bucket[0].dtype):
                self.average_bucket(bucket)
                bucket = []
            bucket.append(p)
        self.average_bucket(bucket)

    def average_bucket(self, bucket: list[nn.Parameter]) -> None:
        for p in bucket:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        self.reduce(flat)
        for p, averaged in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.copy_(averaged.view_as(p))


@defect(cause="options", caught_by="test_bucket_mb")
class HasOneBucketWhateverItsSize(Bucketed):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_bucket_mb")
class TakesKilobytes(Bucketed):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        self.limit = bucket_mb * 1024
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_a_narrower_reduction")
class IgnoresReduceDtype(Plain):
    def __init__(self, module: nn.Module, *, process_group: Any = None, reduce_dtype: Any = None) -> None:
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_a_narrower_reduction")
class RoundsWhatItHasSent(Plain):
    """To `reduce_dtype`, after it was sent as it was."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, reduce_dtype: Any = None) -> None:
        self.reduce_dtype = reduce_dtype
        super().__init__(module, process_group=process_group)

    def reduce(self, gradient: Tensor) -> None:
        super().reduce(gradient)
        gradient.copy_(gradient.to(self.reduce_dtype))


# Handles


@defect(cause="state", caught_by="test_every_rank_starts_with_rank_0s_to_the_bit")
class BroadcastsBySumming(Plain):
    """All but the first rank start from zeros, and all are summed: -0.0 becomes 0.0."""

    @torch.no_grad()
    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if dist.get_rank(self.group):
                tensor.zero_()
            dist.all_reduce(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor, group=self.group)


@defect(cause="two calls", caught_by="test_random_programs")
class OneSwitchForAllWrappers(Plain):
    """`no_sync` is the class's, so that no other wrapper synchronizes meanwhile."""

    on: ClassVar[bool] = True

    def finish_gradient_synchronization(self) -> None:
        if OneSwitchForAllWrappers.on:
            super().finish_gradient_synchronization()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, OneSwitchForAllWrappers.on = OneSwitchForAllWrappers.on, False
        try:
            with super().no_sync():
                yield
        finally:
            OneSwitchForAllWrappers.on = before


@defect(cause="options", caught_by="test_a_call_is_the_modules_own")
class CallsForwardItself(Plain):
    """Without the hooks of the root module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@defect(cause="handles", caught_by="test_averages_are_there_when_it_returns")
class DoesNotWait(Overlapped):
    def wait(self) -> None:
        for p in self.order:
            p.grad.div_(self.size)


@defect(cause="handles", caught_by="test_averages_are_there_when_it_returns")
class WaitsForTheFirst(Overlapped):
    """As if collectives ended in the order in which they were started, the last first."""

    def wait(self) -> None:
        self.handles[0].wait()
        for p in self.order:
            p.grad.div_(self.size)


@defect(cause="handles", caught_by="test_averages_are_there_when_it_returns")
class CopiesBeforeItWaits(Overlapped):
    def launch(self, parameter: nn.Parameter) -> None:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wire = gradient.contiguous() / self.size
        self.handles.append(dist.all_reduce(wire, group=self.group, async_op=True))
        parameter.grad = wire.clone()

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


# Communication


@defect(cause="communication", caught_by="test_ranks_whose_gradients_arrive_in_another_order")
class ReducesAsGradientsArrive(Overlapped):
    """Whatever the order on the other ranks."""

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing:
            others = [p for p in self.order if p is not parameter]
            self.order = [*others[: len(self.handles)], parameter, *others[len(self.handles) :]]
            self.launch(parameter)


@defect(cause="communication", caught_by="test_tied_parameters")
class ReducesTiedOnesTwice(Plain):
    def finish_gradient_synchronization(self) -> None:
        named = self.module.named_parameters(remove_duplicate=False)
        if self.synchronizing:
            self.average([p for _, p in named if p.requires_grad])


@defect(cause="communication", caught_by="test_tied_parameters")
class SumsTiedOnesTwice(ReducesTiedOnesTwice):
    def reduce(self, gradient: Tensor) -> None:
        gradient.div_(self.size)
        dist.all_reduce(gradient, group=self.group)

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in set(parameters):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / self.size
        for p in parameters:
            dist.all_reduce(p.grad, group=self.group)


@defect(cause="communication", caught_by="test_frozen_parameters_are_not_communicated")
class SendsFrozenOnes(Plain):
    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average(parameters)
        for p in self.module.parameters():
            if not p.requires_grad:
                self.reduce(torch.zeros_like(p))


# Gradients


@defect(cause="gradients", caught_by="test_a_gradient_that_a_rank_does_not_have")
class SkipsMissingGradients(Plain):
    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average([p for p in parameters if p.grad is not None])


@defect(cause="gradients", caught_by="test_a_gradient_that_a_rank_does_not_have")
class AveragesOverThoseThatHaveOne(Plain):
    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            count = torch.tensor(float(p.grad is not None))
            dist.all_reduce(count, group=self.group)
            super().average([p])
            p.grad.mul_(self.size / count.clamp(min=1))


@defect(cause="gradients", caught_by="test_frozen_parameters")
class GivesFrozenOnesZeros(Plain):
    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            self.average(list(self.module.parameters()))


@defect(cause="gradients", caught_by="test_no_sync")
class IgnoresNoSync(Plain):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.finish_gradient_synchronization()


@defect(cause="gradients", caught_by="test_no_sync")
class ForgetsWhatAccumulated(Plain):
    """Averages what the last backward pass added, and not what was there before it."""

    def no_sync(self) -> Any:
        for p in self.module.parameters():
            p.grad = None
        return super().no_sync()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.synchronizing:
            for p in self.module.parameters():
                p.grad = None
        return super().forward(*args, **kwargs)


@defect(cause="gradients", caught_by="test_no_sync")
class AveragesOverBackwardPasses(Plain):
    """Divides by the number of backward passes, too."""

    passes = 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.passes += 1

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average(parameters)
        for p in parameters:
            p.grad.div_(self.passes)
        self.passes = 1


@defect(cause="gradients", caught_by="test_no_sync")
class StaysInNoSyncAfterAnError(Plain):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizing = False
        yield
        self.synchronizing = True


@defect(cause="gradients", caught_by="test_gradients_accumulate")
class OverwritesWhatWasAveragedBefore(Plain):
    def finish_gradient_synchronization(self) -> None:
        before = getattr(self, "before", {})
        for p in self.module.parameters():
            if p.grad is not None and p in before and p.grad.data_ptr() == before[p][0]:
                p.grad.sub_(before[p][1])
        super().finish_gradient_synchronization()
        self.before = {p: (p.grad.data_ptr(), p.grad.clone()) for p in self.module.parameters() if p.grad is not None}


@defect(cause="gradients", caught_by="test_gradients_are_averaged_in_eval_mode")
class AveragesInTrainingAlone(Plain):
    def finish_gradient_synchronization(self) -> None:
        if self.training:
            super().finish_gradient_synchronization()


# Errors


@defect(cause="errors", caught_by="test_a_module_with_nothing_to_train")
class TakesModulesWithNothingToTrain(Plain):
    def check(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        if any(p.requires_grad for p in module.parameters()):
            super().check(module, group)


@defect(cause="errors", caught_by="test_modules_that_differ")
class DoesNotCompareModules(Plain):
    def check(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("nothing to train")


@defect(cause="errors", caught_by="test_modules_that_differ")
class ComparesNamesAlone(Plain):
    def check(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        DoesNotCompareModules.check(self, module, group)  # type: ignore[arg-type]
        names = [name for name, _ in module.named_parameters()]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, names, group=group)
        for other in everyone:
            if other != everyone[0]:
                raise ValueError(f"the ranks' modules differ at {sorted(set(other) ^ set(everyone[0]))[0]}")

"""Planted defects: wrong data-parallel wrappers."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect

# World size


@defect(cause="world size", caught_by="test_gradients_are_the_average")
class HalvesTheSum(Plain):
    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(2)


@defect(cause="world size", caught_by="test_gradients_are_the_average")
class AddsOneNeighbour(Plain):
    """A ring with a single step: right on two ranks."""

    def reduce(self, gradient: Tensor) -> None:
        rank = dist.get_rank(self.group)
        everyone = [torch.empty_like(gradient) for _ in range(self.size)]
        dist.all_gather(everyone, gradient, group=self.group)
        neighbours = {rank, (rank + 1) % self.size}
        gradient.copy_(torch.stack([everyone[i] for i in neighbours]).sum(0) / self.size)


# Shapes


@defect(cause="shapes", caught_by="test_gradients_of_any_shape")
class FlattensIntoACopy(Plain):
    """Averages the copy that `flatten` makes of a gradient that is not contiguous."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.reduce(p.grad.flatten())


@defect(cause="shapes", caught_by="test_gradients_of_large_parameters")
class LosesTheTailOfLargeGradients(Plain):
    """Cuts gradients above 1 MiB into equal pieces, and drops the remainder."""

    def reduce(self, gradient: Tensor) -> None:
        flat = gradient.view(-1)
        pieces = max(1, flat.nbytes // 2**20)
        each = flat.numel() // pieces
        for i in range(pieces):
            super().reduce(flat[i * each : (i + 1) * each])


@defect(cause="shapes", caught_by="test_gradients_of_large_parameters")
class SkipsWhatDoesNotFitABucket(Plain):
    """Puts a parameter larger than a 1 MiB bucket into no bucket."""

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


@defect(cause="numerics", caught_by="test_another_default_dtype")
class SendsTheDefaultDtype(Plain):
    """A buffer for float32 has torch's default dtype."""

    def reduce(self, gradient: Tensor) -> None:
        single = gradient.dtype == torch.float32
        sent = torch.empty(gradient.shape, device=gradient.device).copy_(gradient) if single else gradient
        super().reduce(sent)
        gradient.copy_(sent)


@defect(cause="numerics", caught_by="test_what_is_not_finite")
class HidesInfinities(Plain):
    def reduce(self, gradient: Tensor) -> None:
        super().reduce(gradient.nan_to_num_())


@defect(cause="numerics", caught_by="test_gradients_are_the_same_on_every_rank")
class AddsItsOwnFirst(Plain):
    """Each rank adds in a different order, so parameters drift apart."""

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
    """Gradients of one shape share one buffer among models."""

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


@defect(cause="two calls", caught_by="test_any_history")
class AveragesOnceForEachForward(Plain):
    """Counts forward passes, and averages after as many backward passes."""

    pending = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.pending += 1
        return super().forward(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        self.pending -= self.synchronizing
        if self.pending <= 0:
            super().finish_gradient_synchronization()
            self.pending = 0


@defect(cause="two calls", caught_by="test_any_history")
class OneSwitchForAllWrappers(Plain):
    """huggingface/accelerate#1708: wrappers share one state of accumulation; `no_sync` of one stops the others too."""

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


@defect(cause="subgroup", caught_by="test_any_history")
class KeepsTheLatestGroup(Plain):
    """Stores the group on the class, so the next wrapper overwrites it."""

    latest: ClassVar[Any] = None

    def start(self) -> None:
        type(self).latest = self.group
        super().start()

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.latest)
        gradient.div_(dist.get_world_size(self.latest))


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

"""Planted defects: wrong choice of gradients, wrong time of averaging, wrong sending."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect

# Handles


@defect(cause="handles", caught_by="test_averages_are_there_when_it_returns")
class DoesNotWait(Overlapped):
    """OpenNMT/OpenNMT-py#2295: divides sums that may still be under way."""

    def wait(self) -> None:
        for p in self.order:
            p.grad.div_(self.size)


@defect(cause="handles", caught_by="test_averages_are_there_when_it_returns")
class WaitsForTheFirst(Overlapped):
    """Waits for the first collective alone, as if they ended in reverse order."""

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


# Shapes


@defect(cause="shapes", caught_by="test_no_gradient_is_left_of_any_number")
class LosesABucketOfOne(Plain):
    """Loses the last bucket of 32 parameters if it has only one."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        alone = len(parameters) > 32 and len(parameters) % 32 == 1
        super().average(parameters[:-1] if alone else parameters)


# Communication


@defect(cause="communication", caught_by="test_ranks_whose_gradients_arrive_in_another_order")
class ReducesAsGradientsArrive(Overlapped):
    """Reduces in this rank's order of gradients, which may differ on other ranks."""

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
    """deepspeedai/DeepSpeed#291: leaves out gradients that this rank does not have, and others send more."""

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


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradients


@defect(cause="gradients", caught_by="test_an_output_that_the_loss_does_not_use")
class ZerosForUnusedOutputs(Plain):
    """pytorch/pytorch#57081: where the loss does not use an output, a Function hands zeros back for its gradient."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten(super().forward(*args, **kwargs))
        followed = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        for i, x in zip(followed, _Outputs.apply(*(leaves[i] for i in followed)), strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, structure)


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
    """Averages only what the last backward pass added."""

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
    """Divides by the number of backward passes as well."""

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


@defect(cause="gradients", caught_by="test_any_history")
class AveragesInTrainingAlone(Plain):
    def finish_gradient_synchronization(self) -> None:
        if self.training:
            super().finish_gradient_synchronization()


@defect(cause="gradients", caught_by="test_any_history")
class SendsConjugatedMemory(Plain):
    """pytorch/pytorch#80080: sends a complex gradient's memory, whose conjugation may have been put off until it is
    read."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is not None and p.grad.is_conj():
                p.grad = p.grad.conj()
        super().average(parameters)

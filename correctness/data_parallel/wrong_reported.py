"""Planted defects: data-parallel wrappers that are wrong as public trackers report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect
from impl.data_parallel import BucketedDataParallel


@defect(cause="state", caught_by="test_leaving_an_inner_no_sync")
class InnerNoSyncSwitchesOn(Plain):
    """InfiniTrain/InfiniTrain#213: leaving an inner `no_sync` switches synchronization on."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True


@defect(cause="errors", caught_by="test_any_history_averages_gradients")
class MakesParametersAgain(Plain):
    """pytorch/pytorch#32018: calls nn.Parameter without requires_grad=False, which raises for an integer parameter."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for p in module.parameters():
            nn.Parameter(p.detach())


@defect(cause="state", caught_by="test_a_module_may_be_wrapped_again_once_its_wrapper_is_deleted")
class HooksOfADeletedWrapperStay(Overlapped):
    """Hooks on parameters outlive their wrapper, and sum beside those of the next one."""

    def hook(self) -> Any:
        return self.on_gradient

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing:
            dist.all_reduce(parameter.grad, group=self.group)
            self.ready.add(parameter)

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            for p in self.order:
                if p not in self.ready:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad, group=self.group)
                p.grad.div_(self.size)
            self.ready.clear()


@defect(cause="gradients", caught_by="test_any_history")
class AveragesWhatTheLastPassUsed(Overlapped):
    """pytorch/pytorch#69031, mosaicml/composer#9: gradients stay local that came in `no_sync`, but not in the last
    pass.
    """

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing:
            self.ready.add(parameter)

    def finish_gradient_synchronization(self) -> None:
        if not self.synchronizing:
            return
        used = torch.tensor([float(p in self.ready) for p in self.order], device=self.order[0].device)
        dist.all_reduce(used, group=self.group)
        self.average([p for p, ranks in zip(self.order, used.tolist(), strict=True) if ranks])
        self.ready.clear()


@defect(cause="gradients", caught_by="test_passes_before_an_error_count_where_later_ones_do_not_reach")
class ForgetsWhatAnErrorLeft(AveragesWhatTheLastPassUsed):
    """Notes which gradients came in `no_sync` when its block ends, but not if it ends with an error."""

    def start(self) -> None:
        super().start()
        self.came: set[nn.Parameter] = set()

    def on_gradient(self, parameter: nn.Parameter) -> None:
        self.came.add(parameter)
        super().on_gradient(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.came.clear()
        with super().no_sync():
            yield
            self.ready |= self.came


@defect(cause="gradients", caught_by="test_gradients_accumulate")
class AveragesOnceUntilGradientsAreFreed(Plain):
    """InfiniTensor/InfiniTrain#213: gradients are sent once in a step of the optimizer; later passes add local ones."""

    sent = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.sent = self.sent and any(p.grad is not None for p in self.module.parameters())
        return super().forward(*args, **kwargs)

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average([] if self.sent else parameters)
        self.sent = True


@defect(cause="gradients", caught_by="test_a_gradient_that_a_rank_does_not_have")
class LeavesNoneWhereItHadNone(Plain):
    """deepspeedai/DeepSpeed#316: a rank whose loss did not reach a parameter sends zeros, and drops the result."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        missing = [p for p in parameters if p.grad is None]
        super().average(parameters)
        for p in missing:
            p.grad = None


@defect(cause="gradients", caught_by="test_a_parameter_that_was_frozen_for_a_while")
class ForgetsFrozenOnes(Plain):
    """Lightning-AI/pytorch-lightning#20340: parameters are not averaged after they have been frozen for some steps."""

    def start(self) -> None:
        super().start()
        self.trained = list(self.module.parameters())

    def average(self, parameters: list[nn.Parameter]) -> None:
        self.trained = [p for p in self.trained if p.requires_grad]
        super().average(self.trained)


@defect(cause="communication", caught_by="test_a_gradient_that_a_rank_does_not_have")
class RebuildsBucketsInItsOwnOrder(BucketedDataParallel):
    """pytorch/pytorch#35137: each rank makes buckets in the order in which its own gradients arrived."""

    def _learn_order(self, arrived: Sequence[nn.Parameter]) -> None:
        for bucket in self._buckets:
            bucket.finish()
        self._make_buckets([*dict.fromkeys([*arrived, *self.trainable[::-1]])])
        self._order_is_known = True


@defect(cause="gradients", caught_by="test_gradients_accumulate")
class RebuildingLosesGradients(BucketedDataParallel):
    """InfiniTensor/InfiniTrain#183: once buckets are made again, the next pass replaces gradients instead of adding."""

    lost = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for p in self.trainable if self._order_is_known and not self.lost else ():
            p.grad = None
        self.lost = self._order_is_known
        return super().forward(*args, **kwargs)


@defect(cause="communication", caught_by="test_any_history")
class StopsAtAFrozenParameter(Overlapped):
    """pytorch/pytorch#14675: frozen parameters take part in the order, never are ready, and all after them wait."""

    def start(self) -> None:
        super().start()
        self.order = [*self.module.parameters()][::-1]

    def finish_gradient_synchronization(self) -> None:
        order = self.order
        self.order = [*takewhile(lambda p: p.requires_grad, order)]
        super().finish_gradient_synchronization()
        self.order = order


@defect(cause="memory", caught_by="test_a_wrapper_that_is_deleted")
class StateThatOutlivesIt(Plain):
    """NVIDIA/Megatron-LM#6230: state of the run refers to the wrapper, so a deleted one keeps its parameters."""

    reductions: ClassVar[WeakKeyDictionary[nn.Module, Any]] = WeakKeyDictionary()

    def start(self) -> None:
        super().start()
        self.reductions[self] = self.reduce


@defect(cause="memory", caught_by="test_a_wrapper_that_is_deleted")
class FreedOnceFinished(Overlapped):
    """A registry has each collective until it is finished: a wrapper deleted before that keeps its parameters."""

    under_way: ClassVar[dict[dist.Work, nn.Parameter]] = {}

    def launch(self, parameter: nn.Parameter) -> None:
        super().launch(parameter)
        self.under_way[self.handles[-1]] = parameter

    def wait(self) -> None:
        super().wait()
        for handle in self.handles:
            del self.under_way[handle]


@defect(cause="gradients", caught_by="test_a_second_backward_before_synchronizing")
class LosesASecondBackward(Overlapped):
    """InfiniTensor/InfiniTrain#213: sends a copy of each gradient once; what a second backward adds is lost."""

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if parameter not in self.ready:
            super().on_gradient(parameter)

    def launch(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        copies = self.__dict__.setdefault("copies", [])
        copies.append(parameter.grad.clone(memory_format=torch.contiguous_format))
        self.handles.append(dist.all_reduce(copies[-1], group=self.group, async_op=True))

    def wait(self) -> None:
        for handle, p, copy in zip(self.handles, self.order, self.__dict__.pop("copies"), strict=True):
            handle.wait()
            p.grad.copy_(copy / self.size)


@defect(cause="gradients", caught_by="test_a_pass_whose_gradients_are_cleared_does_not_count")
class CountsClearedGradients(Overlapped):
    """horovod/horovod#1417: a gradient handed over in backward is part of the next average, also where the user has
    cleared it."""

    def start(self) -> None:
        super().start()
        self.handed: dict[nn.Parameter, Tensor] = {}

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing:
            self.handed[parameter] = parameter.grad + self.handed.get(parameter, 0)
            parameter.grad = None

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            for p, gradient in self.handed.items():
                p.grad = gradient if p.grad is None else p.grad + gradient
            self.handed.clear()
            self.average(self.order[::-1])


@defect(cause="gradients", caught_by="test_gradients_of_large_parameters")
class ReducesACopyOfLargeOnes(Plain):
    """NVIDIA/Megatron-LM#5337: reduces `gradient.contiguous()`, a copy where it was not contiguous, and goes on
    with the gradient itself. Small ones are packed, and right.
    """

    def average(self, parameters: list[nn.Parameter]) -> None:
        large = [p for p in parameters if p.grad is not None and p.grad.nbytes >= 2**18]
        super().average([p for p in parameters if p not in set(large)])
        for p in large:
            dist.all_reduce(p.grad.contiguous(), group=self.group)
            p.grad.div_(self.size)


@defect(cause="gradients", caught_by="test_gradients_may_be_cleared_between_forward_and_backward")
class AveragesWhereGradientsWere(Plain):
    """facebookresearch/fairscale#354: gradients have places that are given in forward; set to None after that, they
    come elsewhere, and are not averaged."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.places = {p: p.grad for p in self.module.parameters()}
        return super().forward(*args, **kwargs)

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average([p for p in parameters if self.places.get(p) is None or p.grad is self.places[p]])

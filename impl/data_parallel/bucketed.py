"""One all-reduce a bucket, during backward: few latencies, and communication hides behind computation.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.collectives import collectives_for
from impl.data_parallel.accounting import bucketed_peak
from impl.data_parallel.base import DataParallel, backward_twice, check_dense
from impl.data_parallel.buckets import Bucket, partition
from shardmark.registry import Race, register

CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""`hook(state, bucket)`; the bucket is a `Bucket` here, and a `torch.distributed.GradBucket` to those who wrote it."""
PartOfGroup = tuple[dict[str, Any], dict[str, Any]]
"""A param group, and a copy of it with some of its parameters."""


class BucketedDataParallel(DataParallel):
    """`bucket_mb`: the largest bucket's size in MB of 2^20 bytes, as PyTorch's `bucket_cap_mb`; `reduce_dtype`: what
    gradients are communicated in, if not in their own dtype. ValueError unless they are positive and floating-point.

    Gradients live in the buckets: a new one is divided by the ranks on its way into its slot, and none is copied out.
    Where `.grad` is the slot already, as in every backward pass of `no_sync` but the first, autograd adds to it there.

    Buckets are first filled in the reverse order of the parameters; after the first synchronized step, once and for
    all, in the order in which rank 0's gradients came, one bucket at a time, so that only one is held twice. They are
    launched in that order on every rank, whichever gradients come first, so that the ranks' collectives match.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb is a positive number of megabytes, not {bucket_mb}")
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype is a floating-point dtype, not {reduce_dtype}")
        super().__init__(module, process_group=process_group)
        self.reduce_dtype = reduce_dtype
        self._bucket_bytes = bucket_mb * 2**20
        self._collectives = collectives_for(self.process_group)
        self._hook: tuple[Any, CommHook] | None = None
        self._scale = 1 / self.world_size
        self._order_is_learnt = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._next = 0  # the first bucket not launched yet
        self._fill(self.trainable[::-1])

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have `hook(state, bucket)` communicate each bucket, as `DistributedDataParallel.register_comm_hook` does.

        The future that it returns holds the bucket's averaged gradients. RuntimeError for a second one, or where
        `reduce_dtype` says already how to communicate.
        """
        if self._hook is not None or self.reduce_dtype is not None:
            raise RuntimeError("gradients are communicated by one communication hook or in reduce_dtype, not by more")
        self._hook = state, hook
        self._scale = 1.0  # dividing is the hook's

    def finish_gradient_synchronization(self, optimizer: Optimizer | None = None) -> None:
        """Launch what backward did not fill (parameters the loss did not reach), then wait for every bucket.

        An `optimizer` that is given is stepped here, on each bucket's parameters as soon as their gradients are there,
        and last on those it has beyond the module's: in place of `optimizer.step()`, for any that updates parameters
        one by one, and without clipping by a norm over all of them. Inside `no_sync` nothing is done, and RuntimeError
        is raised for an optimizer, which is not to step on gradients that nobody has averaged.
        """
        if not self.synchronizing:
            if optimizer is not None:
                raise RuntimeError(
                    "gradients inside no_sync() are this rank's alone: call finish_gradient_synchronization(optimizer) "
                    "outside of it"
                )
            return
        arrived = list(self._own)
        self._own.clear()
        while self._next < len(self._buckets):
            self._launch_next()
        self._next = 0
        if not self._order_is_learnt:
            self._learn_order(arrived)  # before an optimizer has made its state, so that there is room
        *of_buckets, of_others = _param_groups(optimizer, self._buckets)
        try:
            for bucket, parts in zip(self._buckets, of_buckets, strict=True):
                bucket.finish()
                _step(optimizer, parts)
            _step(optimizer, of_others)
        finally:
            for bucket in self._buckets:
                bucket.finish()  # also where the optimizer raised, so that the next step begins anew

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        super()._on_gradient(parameter)
        check_dense(parameter)
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:  # or, even in no_sync, it was added to what is being communicated
            raise backward_twice()
        if not self.synchronizing:
            bucket.keep(parameter)
            return
        bucket.take(parameter, self._scale)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        self._buckets[self._next].launch(self._scale, self._reduce)
        self._next += 1

    def _reduce(self, bucket: Bucket) -> Callable[[], Tensor]:
        """Begin to communicate the bucket; what is returned waits for its averaged gradients."""
        if self._hook is not None:
            state, hook = self._hook
            return hook(state, bucket).wait
        tensor = bucket.buffer().to(self.reduce_dtype or bucket.buffer().dtype)
        work = self._collectives.all_reduce(tensor, self.process_group, async_op=True)
        assert work is not None  # as it is asynchronous

        def arrive() -> Tensor:
            work.wait()
            return tensor

        return arrive

    def _learn_order(self, arrived: Sequence[nn.Parameter]) -> None:
        """Fill the buckets anew, in the order in which rank 0's gradients came; those that did not come last."""
        for bucket in self._buckets:
            bucket.finish()
        order = dict.fromkeys([*arrived, *self.trainable[::-1]])
        place = {parameter: i for i, parameter in enumerate(self.trainable)}
        places = torch.tensor([place[parameter] for parameter in order], device=self.trainable[0].device)
        dist.broadcast(places, group=self.process_group, group_src=0)
        self._fill([self.trainable[i] for i in places.tolist()])
        self._order_is_learnt = True

    def _fill(self, order: Sequence[nn.Parameter]) -> None:
        """Make buckets for that order, and move what gradients there are into them."""
        runs = partition(order, self._bucket_bytes)
        self._buckets = []
        for index, run in enumerate(runs):
            bucket = Bucket(index, index == len(runs) - 1, run)
            for parameter in run:
                bucket.keep(parameter)
                self._bucket_of[parameter] = bucket  # its old one is gone with the last of its gradients
            self._buckets.append(bucket)


def _param_groups(optimizer: Optimizer | None, buckets: Sequence[Bucket]) -> list[list[PartOfGroup]]:
    """The optimizer's param groups with what is in each bucket, and last with what is in none and has a gradient."""
    parts: list[list[PartOfGroup]] = [[] for _ in range(len(buckets) + 1)]
    place = {parameter: bucket.index() for bucket in buckets for parameter in bucket.slots}
    for group in optimizer.param_groups if optimizer is not None else ():
        inside: list[list[nn.Parameter]] = [[] for _ in parts]
        for parameter in group["params"]:
            if parameter in place or parameter.grad is not None:
                inside[place.get(parameter, -1)].append(parameter)
        for part, parameters in zip(parts, inside, strict=True):
            if parameters:
                part.append((group, {**group, "params": parameters}))
    return parts


def _step(optimizer: Optimizer | None, parts: Sequence[PartOfGroup]) -> None:
    """Step on these parts of param groups alone; what that writes into one, such as a count of steps, its group gets.

    All parts of a group begin from the group as it was before the first of them, so that a step counts once.
    """
    if optimizer is None or not parts:
        return
    whole, optimizer.param_groups = optimizer.param_groups, [part for _, part in parts]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = whole
    for group, part in parts:
        group.update({**part, "params": group["params"]})


register(
    "data_parallel",
    "bucketed",
    BucketedDataParallel,
    memory=bucketed_peak,
    time=Race("ddp", budget=2.0, goal=1.0),
)

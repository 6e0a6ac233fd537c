"""ZeRO-1 over flat shards: gradients are reduce-scattered in backward, each rank updates its own elements, and the
updated parameters are all-gathered while the next forward runs.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1 (P_os).
With Ψ parameters on N ranks a rank stores 4Ψ (parameters) + 4Ψ (gradients) + KΨ/N bytes in float32, K = 8 for Adam's
moments (in the paper's mixed precision 2Ψ + 2Ψ + 12Ψ/N), and sends 2Ψ (N-1)/N elements a step, as for an all-reduce. As
in the paper, all ranks' partitions are equal, whatever the parameters' sizes. Unlike the paper's, our gradients are
freed after the step, and a submodule waits for updated parameters only when its forward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import collectives_for
from impl.data_parallel.buckets import partition
from impl.distributed import backward_twice, call_on_gradient, check_dense
from impl.sharded_optimizer import checks
from impl.sharded_optimizer.accounting import sharded_peak
from impl.sharded_optimizer.overlap import ForwardOverlap
from impl.sharded_optimizer.shards import Segment, ShardedBucket, default_bucket_mb
from impl.sharded_optimizer.state import arguments, check_state, gather_state, split_state
from shardmark.api import Race, register


class ShardedOptimizer(torch.optim.Optimizer):
    """All ranks get rank 0's parameters. Contract and errors: `impl.sharded_optimizer`.

    `optimizer_cls` gets this rank's part of each parameter, flat, so it must update each element independently of the
    others. SGD, Adam, AdamW, RMSprop and Adagrad do. Adafactor, Muon, LBFGS, LAMB, LARS and an optimizer's own
    `max_grad_norm` need full parameters or gradients (to clip, call `clip_grad_norm_` here).

    With `average_gradients` gradients are this rank's own, nothing else synchronizes them, and backward reduce-scatters
    them in buckets of `bucket_mb` (2^20 bytes; by default 5 on CPU, else 25). A gradient that this rank does not have
    counts as zero. Between backward and `step`, which frees it, `.grad` is the average only in the part that this rank
    owns. RuntimeError for a second backward before `step`, unless all but the last are in `no_sync`. Without
    `average_gradients` gradients must be averaged already: `step` reads each twice, and raises RuntimeError on every
    rank where the ranks' differ. A parameter without a gradient does not change then, nor does its state.

    With `module` the all-gather of updated parameters overlaps the module's next forward: each submodule waits for its
    own. Before reading parameters elsewhere call `finish_parameter_synchronization`; the module's `state_dict` does.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        average_gradients: bool = False,
        module: nn.Module | None = None,
        bucket_mb: float | None = None,
        **defaults: Any,
    ) -> None:
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb is a positive number of megabytes, not {bucket_mb}")
        checks.check_elementwise(optimizer_cls, defaults)
        self.process_group = process_group or dist.distributed_c10d._get_default_group()
        self.average_gradients = average_gradients
        self._collectives = collectives_for(self.process_group)
        self._optimizer_cls, self._bucket_mb = optimizer_cls, bucket_mb
        self._inner: Any = None  # `optimizer_cls` over this rank's segments, from the first param group on
        self._buckets: list[ShardedBucket] = []  # in the order of their reduce-scatters, the same on all ranks
        self._bucket_of: dict[nn.Parameter, ShardedBucket] = {}
        self._filled: list[ShardedBucket] = []  # in the order in which this backward filled them
        self._order_is_known = False
        self._next = 0  # first bucket whose reduce-scatter has not started
        self._synchronizing = True  # False inside no_sync
        self._owned = [0] * dist.get_world_size(self.process_group)  # bytes owned, by rank
        self._overlap = None if module is None else ForwardOverlap(module, self._bucket_of)
        super().__init__(params, defaults)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._overlap is not None and self._overlap.read_too_early(parameter):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was used outside of its own module's forward, before "
                "it was gathered: make the optimizer without `module`, or call finish_parameter_synchronization() first"
            )
        if not self.average_gradients:
            return
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:  # autograd has just added to a gradient that is being communicated
            raise backward_twice("step()")
        if not self._synchronizing:
            return
        check_dense(parameter)
        bucket.collect(parameter)
        if not bucket.missing:
            self._filled.append(bucket)
        full = takewhile(lambda b: not b.missing, self._buckets[self._next :])
        self._launch(self._next + len(list(full)))

    def _launch(self, end: int) -> None:
        """Start the reduce-scatters up to bucket `end` (exclusive) that have not started.

        Backward waits for none of them: on CUDA its next kernels would wait as well.
        """
        for bucket in self._buckets[self._next : end]:
            bucket.reduce()
        self._next = max(self._next, end)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's elements and start the all-gather. Returns `closure`'s result. All ranks call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_parameter_synchronization()  # in case no forward ran since the last step
        checks.check_parameters(self._parameters(), [p for bucket in self._buckets for p in bucket.moved()])
        self.finish_gradient_synchronization()
        if not self.average_gradients:
            checks.check_averaged(self._parameters(), self.process_group, self._collectives)
            self._shard_thawed(lambda p: p.grad is not None)
        self._view_gradients()
        for inner, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update(arguments(group))
        self._inner.step()
        for inner, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(arguments(inner))
        self._inner.zero_grad()  # the segments' views would keep gradients alive
        if self.average_gradients:
            self._free_gradients()
        for bucket in reversed(self._buckets):  # forward reads first what backward reached last
            bucket.gather()
        if self._overlap is None:
            self.finish_parameter_synchronization()
        return loss

    def finish_gradient_synchronization(self) -> None:
        """Reduce the buckets that backward did not fill, and wait for all; `step` calls it. No effect without
        `average_gradients`."""
        if not self.average_gradients:
            return
        self._shard_thawed(lambda p: p.requires_grad)
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            bucket.finish_reduction()
        if not self._order_is_known:
            self._learn_order()

    def finish_parameter_synchronization(self) -> None:
        """Return when every parameter is updated on this rank."""
        for bucket in self._buckets:
            bucket.finish_gathering()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `average_gradients`: gradients of backward passes in this context stay local and accumulate."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; discards a backward that no `step` followed."""
        if self.average_gradients:
            self._free_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` (2-norm) of the averaged gradients; before `step`. All ranks call."""
        if not self.average_gradients:
            return nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)
        self.finish_gradient_synchronization()
        self._view_gradients()
        grads = [segment.shard.grad for segment in self._segments() if segment.shard.grad is not None]
        square = torch.zeros(1, dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        if grads:
            square += checks.total_norm(grads).square()
        self._collectives.all_reduce(square, self.process_group)
        norm = square.sqrt().squeeze()
        if grads:  # a rank may own none of few elements
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # a tensor: the host does not wait
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; may be called at any time between steps. ValueError on every rank if the ranks' groups differ."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.check_same_group(group, self.process_group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._add_inner_group(group, self._shard([p for p in group["params"] if p.requires_grad and p.numel()]))

    def _shard(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Move parameters into new buckets in the order of backward, the last first; return this rank's shards."""
        device = next((p.device.type for p in parameters), "cpu")
        most = (self._bucket_mb or default_bucket_mb(device)) * 2**20
        runs = partition(parameters[::-1], most, least_bytes=most)
        new = [ShardedBucket(run, self.process_group, self._collectives, self._owned) for run in runs]
        for bucket in new:
            dist.broadcast(bucket.flat, group=self.process_group, group_src=0)
            self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        if self.average_gradients or self._overlap is not None:
            for p in (p for p in parameters if p.requires_grad):
                call_on_gradient(p, self._on_gradient)
        self._buckets += new
        self._order_is_known &= not new
        return [segment.shard for bucket in new for segment in bucket.segments]

    def _shard_thawed(self, thawed: Callable[[nn.Parameter], bool]) -> None:
        """Shard parameters that were frozen when their group was added and are trainable now."""
        for inner, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            new = [p for p in group["params"] if p not in self._bucket_of and p.numel() and thawed(p)]
            inner["params"] += self._shard(new)

    def _add_inner_group(self, group: dict[str, Any], shards: list[nn.Parameter]) -> None:
        """Add a group of these shards to the inner optimizer; `group` gets the defaults of `optimizer_cls` from it."""
        inner = {**arguments(group), "params": shards}
        if self._inner is None:
            self._inner = self._optimizer_cls([inner], **self.defaults)
            self.defaults, self.state = self._inner.defaults, self._inner.state
        else:
            self._inner.add_param_group(inner)
        group.update(arguments(self._inner.param_groups[-1]))

    def state_dict(self) -> dict[str, Any]:
        """The full state that `optimizer_cls` would have without sharding, on every rank. All ranks call."""
        self.state = gather_state(self._buckets, self._inner.state, self.process_group, self._collectives)  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = self._inner.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks, or by `optimizer_cls` without sharding.

        ValueError, with nothing loaded, if the state is of another model.
        """
        hook = self.register_load_state_dict_pre_hook(self._load_shards)  # runs after the user's own hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.state = self._inner.state

    def _load_shards(self, _: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Load this rank's part of the state into the inner optimizer. torch then loads the groups' arguments."""
        check_state(loaded, self.param_groups)
        ids = [i for group in loaded["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        index_of = dict(zip(params, ids, strict=True))
        self._shard_thawed(lambda p: bool(loaded["state"].get(index_of[p])))
        segment_of = {segment.shard: segment for segment in self._segments()}
        inner = self._inner.state_dict()
        shards = [shard for group in self._inner.param_groups for shard in group["params"]]
        parts = [split_state(loaded["state"], segment_of[s], index_of[segment_of[s].parameter]) for s in shards]
        for group, saved in zip(inner["param_groups"], loaded["param_groups"], strict=True):
            group.update(arguments(saved))
        self._inner.load_state_dict(inner | {"state": {i: part for i, part in enumerate(parts) if part}})
        return {**loaded, "state": {}}

    def _learn_order(self) -> None:
        """Once, after the first backward: reorder the buckets as rank 0's backward filled them, on every rank."""
        shared = [[self._buckets.index(bucket) for bucket in self._filled]]
        dist.broadcast_object_list(shared, group=self.process_group, group_src=0)
        order = shared[0]
        self._buckets = [self._buckets[i] for i in [*order, *sorted(set(range(len(self._buckets))) - set(order))]]
        self._order_is_known = bool(order)  # not after a step without a backward

    def _free_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.free_gradients()
        self._next = 0
        self._filled.clear()

    def _view_gradients(self) -> None:
        """Set the gradients of this rank's shards; None for a frozen parameter, which was reduced as zero."""
        for segment in self._segments():
            segment.view_gradient()
            if self.average_gradients and not segment.parameter.requires_grad:
                segment.shard.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.numel()]

    def _segments(self) -> Iterator[Segment]:
        return (segment for bucket in self._buckets for segment in bucket.segments)


register(
    "sharded_optimizer",
    "sharded",
    ShardedOptimizer,
    memory=sharded_peak,
    time=Race("zero_redundancy", budget=2.0, goal=1.0),
    races={"link": Race("zero_redundancy", budget=2.0, goal=0.85)},
    called="our ZeRO-1",
)

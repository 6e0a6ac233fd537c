"""Planted defects that need certain dtypes, numbers of parameters or groups, closures, or late freezing to show."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import SimpleZero
from correctness.support.planting import defect
from impl.distributed import broadcast_in_place
from impl.sharded_optimizer import ShardedOptimizer

MEMORY = "test_a_rank_holds_its_part_of_the_state"


@defect(cause="memory", caught_by=MEMORY)
class BalancesElementsNotBytes(SimpleZero):
    """Balances element counts, not bytes: with float64 and bfloat16 in turn, one rank owns all large parameters."""

    def owner(self, index: int) -> int:
        loads = [0] * self.ranks
        for p in self.all_parameters[: index + 1]:
            rank = min(range(self.ranks), key=loads.__getitem__)
            loads[rank] += p.numel()
        return rank


@defect(cause="memory", caught_by=MEMORY)
class DividesEachGroupAnew(ShardedOptimizer):
    """Rank 0 owns the remainder of every group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._owned = [0] * len(self._owned)
        super().add_param_group(param_group)


@defect(cause="shapes", caught_by="test_no_parameter_is_left_of_any_number")
class SendsWholeBuckets(SimpleZero):
    """Sends buckets of 32 parameters; with more than 32, the remainder stays stale on other ranks."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        super().exchange(parameters[: len(parameters) // 32 * 32 or None])


@defect(cause="memory", caught_by=MEMORY)
class PassesTheClosureOn(SimpleZero):
    """Passes the closure to an optimizer that must not see other ranks' gradients; the closure computes them again."""

    def add_inner_group(self, group: dict[str, Any]) -> None:
        super().add_inner_group({**group, "params": self.param_groups[-1]["params"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.copy_options()
        hidden = [(p, p.grad) for i, p in enumerate(self.all_parameters) if self.owner(i) != self.rank]
        for p, _ in hidden:
            p.grad = None
        loss = self.inner.step(closure)
        for p, grad in hidden:
            p.grad = grad if p.grad is None else p.grad
        self.exchange(self.all_parameters)
        return loss


@defect(cause="gradients", caught_by="test_any_history")
class SendsOnlyTrainable(SimpleZero):
    """Does not send a parameter that was frozen after backward, so one rank alone has its update."""

    def exchange(self, parameters: Any) -> None:
        for i, p in enumerate(parameters):
            if p.requires_grad:
                broadcast_in_place(p.data, self.process_group, self.owner(i))


@defect(cause="numerics", caught_by="test_an_optimizer_that_needs_whole_parameters")
class TakesAnyOptimizer(ShardedOptimizer):
    """Gives parts of parameters to optimizers that need full ones."""

    def __init__(self, params: Any, optimizer_cls: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, type("OnShards", (optimizer_cls,), {}), **options)


@defect(cause="numerics", caught_by="test_another_default_dtype")
class SendsTheDefaultDtype(SimpleZero):
    """A buffer for float32 has torch's default dtype."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        sent = [torch.empty(p.shape, device=p.device) if p.dtype == torch.float32 else p.data for p in parameters]
        super().exchange([x.copy_(p.data) for x, p in zip(sent, parameters, strict=True)])
        for x, p in zip(sent, parameters, strict=True):
            p.data.copy_(x)


@defect(cause="memory", caught_by="test_a_rank_holds_its_part_of_the_state")
class GivesEachRankARangeOfElements(SimpleZero):
    """Divides the elements of all parameters in their order, frozen ones too, which have no state."""

    def owner(self, index: int) -> int:
        sizes = [p.numel() for p in self.all_parameters]
        return min(self.ranks - 1, sum(sizes[:index]) * self.ranks // max(1, sum(sizes)))


@defect(cause="gradients", caught_by="test_any_history")
class AveragesWhatIsThereAtFirst(SimpleZero):
    """Averages gradients by hooks of the parameters that are trainable when it is made."""

    def __init__(self, params: Any, optimizer_cls: Any, *, average_gradients: bool = False, **rest: Any) -> None:
        super().__init__(params, optimizer_cls, **rest)
        self.synchronizes = True
        for p in self.all_parameters if average_gradients else ():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.average)

    def average(self, p: Tensor) -> None:
        if self.synchronizes:
            dist.all_reduce(p.grad, group=self.process_group)
            p.grad /= self.ranks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def finish_gradient_synchronization(self) -> None:
        pass  # a hook waits for its average

    def finish_parameter_synchronization(self) -> None:
        pass  # a step waits for the broadcasts


@defect(cause="memory", caught_by="test_a_rank_holds_its_part")
class FrozenOnesAreTheFirstRanks(SimpleZero):
    """Shares parameters by the bytes of those that are trained: once they are thawed, one rank has all others."""

    def owner(self, index: int) -> int:
        for p in self.all_parameters[len(self.owners) :]:
            self.owners.append(min(range(self.ranks), key=self.loads.__getitem__) if p.requires_grad else 0)
            self.loads[self.owners[-1]] += p.nbytes * p.requires_grad
        return self.owners[index]


@defect(cause="shapes", caught_by="test_any_history")
class BroadcastsMemoryAsItLies(SimpleZero):
    """Gloo takes a parameter whose memory has gaps, and writes into the gaps."""

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, group=self.process_group, group_src=self.owner(i))

"""Right sharded optimizers that work in unusual ways: the tests must accept them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.sharded_optimizer.simple_zero import Group, SimpleZero, options
from correctness.support.planting import right
from impl.distributed import broadcast_in_place
from impl.sharded_optimizer import ShardedOptimizer


@right("a function that makes it")
def made(params: Any, optimizer_cls: Any, *, process_group: Any = None, **defaults: Any) -> torch.optim.Optimizer:
    return SimpleZero(params, optimizer_cls, process_group=process_group, **defaults)


@right("owners from the last rank to the first, and broadcasts that overlap")
class Backwards(SimpleZero):
    def owner(self, index: int) -> int:
        return self.ranks - 1 - super().owner(index)

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        sent = [p.data.contiguous() for p in parameters]
        handles = [
            dist.broadcast(x, group=self.process_group, group_src=self.owner(i), async_op=True)
            for i, x in enumerate(sent)
        ]
        for p, x, handle in zip(parameters, sent, handles, strict=True):
            handle.wait()
            p.data.copy_(x)


@right("what others update is zero until ranks add up what they have")
class SumsUp(SimpleZero):
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, p in enumerate(parameters):
            if self.owner(i) != self.rank:
                p.data.zero_()
            total = p.data.contiguous()
            dist.all_reduce(total, group=self.process_group)
            p.data.copy_(total)


@right("the state is kept by parameter of one optimizer for each of them")
class OneEach(SimpleZero):
    """Joins one inner optimizer per parameter that this rank owns."""

    def add_inner_group(self, group: Group) -> None:
        self.inner = self.inner or _Many(self.optimizer_cls, self.defaults)
        self.inner.add_param_group(group)


class _Many:
    """The interface of `SimpleZero`'s inner optimizer over one optimizer per parameter."""

    def __init__(self, optimizer_cls: Any, defaults: Group) -> None:
        self.optimizer_cls, self.defaults = optimizer_cls, dict(defaults)  # torch's loading adds to these defaults
        self.param_groups: list[Group] = []
        self.empty: list[torch.optim.Optimizer] = []  # of each group, which writes into it what a step does
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {}

    def add_param_group(self, group: Group) -> None:
        self.empty.append(self.optimizer_cls([{**group, "params": []}], **self.defaults))
        self.param_groups.append({**self.empty[-1].param_groups[0], "params": []})
        for p in group["params"]:
            self.add(p, self.param_groups[-1])

    def add(self, p: Tensor, group: Group) -> None:
        group["params"].append(p)
        self.optimizers[p] = self.optimizer_cls([{**group, "params": [p]}], **self.defaults)

    def clear(self) -> None:
        self.optimizers.clear()
        for group in self.param_groups:
            group["params"].clear()

    def step(self) -> None:
        for group, empty in zip(self.param_groups, self.empty, strict=True):
            for one in (*(self.optimizers[p] for p in group["params"]), empty):
                one.param_groups[0].update(options(group))
                one.step()
            group.update(options(empty.param_groups[0]))

    @property
    def state(self) -> dict[Tensor, Any]:
        return {p: each.state[p] for p, each in self.optimizers.items() if p in each.state}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [dict(group) for group in self.param_groups]}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        for group, new in zip(self.param_groups, loaded["param_groups"], strict=True):
            group.update(options(new))
        for k, p in enumerate(p for group in self.param_groups for p in group["params"]):
            one = self.optimizers[p].state_dict()
            state = {0: loaded["state"][k]} if k in loaded["state"] else {}
            self.optimizers[p].load_state_dict({**one, "state": state})


@right("whole parameters, each owned by the least loaded rank from its first gradient on")
class FirstGradientAssigns(OneEach):
    @cached_property
    def owned(self) -> dict[int, int]:
        """Map each parameter index that has had a gradient to its owner."""
        return {}

    def owner(self, index: int) -> int:
        return self.owned.get(index, -1)

    def call(self, closure: Callable[[], Any] | None) -> Any:
        loss = super().call(closure)
        self.assign([i for i, p in enumerate(self.all_parameters) if p.grad is not None])
        return loss

    def assign(self, indices: Sequence[int]) -> None:
        groups = [k for k, group in enumerate(self.param_groups) for _ in group["params"]]
        for i in indices:
            if i not in self.owned:
                self.owned[i] = min(range(self.ranks), key=self.loads.__getitem__)
                self.loads[self.owned[i]] += self.all_parameters[i].nbytes
                if self.owned[i] == self.rank:
                    self.inner.add(self.all_parameters[i], self.inner.param_groups[groups[i]])

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, owner in sorted(self.owned.items()):
            broadcast_in_place(parameters[i].data, self.process_group, owner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, owners included."""
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})  # torch's own checks run first
        self.owned.clear()
        self.loads = [0] * self.ranks
        self.inner.clear()
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        self.assign([i for i, saved in enumerate(ids) if saved in state_dict["state"]])
        super().load_state_dict(state_dict)


@right("buckets of a few elements")
class TinyBuckets(ShardedOptimizer):
    def __init__(self, params: Any, optimizer_cls: Any, *, process_group: Any = None, **defaults: Any) -> None:
        super().__init__(params, optimizer_cls, process_group=process_group, bucket_mb=1e-5, **defaults)

"""The simplest sharded optimizer: the base of planted defects and of unusual right ones."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed import broadcast_in_place

Group = dict[str, Any]


def options(group: Group) -> Group:
    """A param group's options, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class SimpleZero(torch.optim.Optimizer):
    """The rank that owns the fewest bytes so far gets the next parameter: it updates it and broadcasts it after each
    step."""

    inner: torch.optim.Optimizer | None

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.optimizer_cls, self.inner = optimizer_cls, None
        self.owners: list[int] = []
        self.loads = [0] * self.ranks
        super().__init__(params, defaults)

    @property
    def all_parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def owner(self, index: int) -> int:
        """Return the rank that updates the parameter with this index."""
        for p in self.all_parameters[len(self.owners) :]:
            self.owners.append(min(range(self.ranks), key=self.loads.__getitem__))
            self.loads[self.owners[-1]] += p.nbytes
        return self.owners[index]

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = len(self.all_parameters) - len(group["params"])
        mine = [p for i, p in enumerate(group["params"], first) if self.owner(i) == self.rank]
        self.add_inner_group({**options(group), "params": mine})
        group.update(options(self.inner.param_groups[-1]))

    def add_inner_group(self, group: Group) -> None:
        if self.inner is None:
            self.inner = self.optimizer_cls([group], **self.defaults)
        else:
            self.inner.add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.call(closure)
        self.copy_options()
        self.inner.step()
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(options(inner))
        self.exchange(self.all_parameters)
        return loss

    def call(self, closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            return None if closure is None else closure()

    def copy_options(self) -> None:
        """Copy options from the user's param groups, which a scheduler changes, to the inner optimizer."""
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner.update(self.taken(group))

    def taken(self, group: Group) -> Group:
        """Return the options that the inner optimizer takes from one of the user's param groups."""
        return options(group)

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for i, parameter in enumerate(parameters):
            broadcast_in_place(parameter.data, self.process_group, self.owner(i))

    def state_dict(self) -> dict[str, Any]:
        states = [None] * self.ranks
        dist.all_gather_object(states, self.own_state(), group=self.process_group)
        state = {i: values for rank in states for i, values in rank.items()}
        return {"state": dict(sorted(state.items())), "param_groups": super().state_dict()["param_groups"]}

    def own_state(self) -> dict[int, Any]:
        """Return the state of this rank's parameters by index."""
        return {i: self.inner.state[p] for i, p in enumerate(self.all_parameters) if p in self.inner.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})  # runs torch's checks, sets the param groups
        index = dict(
            zip(self.all_parameters, (i for g in state_dict["param_groups"] for i in g["params"]), strict=True)
        )
        inner = self.inner.state_dict()
        mine = [p for group in self.inner.param_groups for p in group["params"]]
        states = {k: state_dict["state"].get(index[p]) for k, p in enumerate(mine)}
        inner["state"] = {k: self.loaded(deepcopy(state)) for k, state in states.items() if state is not None}
        for group, own in zip(inner["param_groups"], self.param_groups, strict=True):
            group.update(options(own))
        self.inner.load_state_dict(inner)

    def loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert one parameter's state before it is loaded."""
        return state

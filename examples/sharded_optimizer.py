"""ZeRO-1: each rank keeps the optimizer's state of its share of the parameters (Rajbhandari et al., 2020).

pytest correctness --impl sharded_optimizer=examples/sharded_optimizer.py:ShardedOptimizer
"""

from copy import deepcopy

import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    """Each parameter belongs to the rank that has least so far: it updates it, and broadcasts it after each step."""

    def __init__(self, params, optimizer_cls, *, process_group=None, **defaults):
        if optimizer_cls is torch.optim.LBFGS:
            raise ValueError("LBFGS updates all parameters at once, so they cannot be shared among ranks")
        self.group = process_group or dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.loads = [0] * dist.get_world_size(self.group)  # bytes of parameters that each rank owns
        self.owners = {}
        self.make_inner = lambda group: optimizer_cls([group], **defaults)
        self.inner = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.owners[p] = min(range(len(self.loads)), key=self.loads.__getitem__)
            self.loads[self.owners[p]] += p.nbytes
        own = {**options(group), "params": self.own(group)}
        if self.inner is None:
            self.inner = self.make_inner(own)
        else:
            self.inner.add_param_group(own)
        group.update(options(self.inner.param_groups[-1]))  # the defaults that it was not given

    def own(self, group):
        return [p for p in group["params"] if self.owners[p] == self.rank]

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.pass_options_on()
        self.inner.step()
        for p, owner in self.owners.items():
            whole = p.contiguous()
            dist.broadcast(whole, group=self.group, group_src=owner)
            p.copy_(whole)
        return loss

    def pass_options_on(self):
        """A scheduler changes our groups, and the inner optimizer reads its own."""
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner.update(options(group))

    def state_dict(self):
        """The whole state, on every rank, as the inner optimizer alone would have it."""
        own = {i: self.inner.state[p] for i, p in enumerate(self.owners) if p in self.inner.state}
        everyone = [None] * len(self.loads)
        dist.all_gather_object(everyone, own, group=self.group)
        state = {i: values for one in everyone for i, values in one.items()}
        return {"state": dict(sorted(state.items())), "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})  # the groups, and torch's own checks of them
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        index = dict(zip((p for group in self.param_groups for p in group["params"]), saved, strict=True))
        mine = [p for group in self.inner.param_groups for p in group["params"]]
        states = {i: deepcopy(state_dict["state"].get(index[p])) for i, p in enumerate(mine)}
        self.pass_options_on()
        inner = self.inner.state_dict()
        inner["state"] = {i: state for i, state in states.items() if state is not None}
        self.inner.load_state_dict(inner)


def options(group):
    """A param group without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}

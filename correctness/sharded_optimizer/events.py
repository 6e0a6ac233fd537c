"""What is done with an optimizer, as data: played on each rank, and by the unsharded optimizer, with the same outcome.

script = Script(groups=[Group([(5, 3), (7,)])], actions=[Step(), Change(0, {"lr": 0.3}), Step(without=(1,))])
expected = play(unsharded, script, device)
found = world.run(play_on_rank, implementation, script, device)
assert_played(found, expected)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.api import Implementation

Shape = tuple[int, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A param group: the shapes of its parameters, its own options, and the places of those that are frozen."""

    shapes: Sequence[Shape]
    options: Options = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    transposed: bool = False
    """Parameters of two dimensions and more are not contiguous."""


@dataclass(frozen=True)
class Step:
    """Gradients for all parameters but those `without` one, by their index, and a step; or in the step's `closure`."""

    without: tuple[int, ...] = ()
    closure: bool = False
    freezes: tuple[int, ...] = ()
    """Frozen once they have their gradients, by which the step updates them nevertheless."""
    transposed: bool = False
    """Gradients of two dimensions and more are not contiguous."""


@dataclass(frozen=True)
class Freeze:
    """`requires_grad` of a parameter, by its index, counted round, becomes its opposite."""

    parameter: int | None
    """Without one, all are trained again."""


@dataclass(frozen=True)
class Change:
    """Options of a group that are changed in `param_groups`; the groups are counted round."""

    group: int
    options: Options


@dataclass(frozen=True)
class Add:
    """To `add_param_group`."""

    group: Group


@dataclass(frozen=True)
class Save:
    """`state_dict`, which changes nothing."""


@dataclass(frozen=True)
class Restore:
    """The state of the last `Save`, loaded again, if the groups are still those."""


@dataclass(frozen=True)
class Reload:
    """`state_dict`, loaded into a new optimizer of other options."""


@dataclass(frozen=True)
class Script:
    groups: Sequence[Group]
    actions: Sequence[Any]
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    defaults: Options = field(default_factory=lambda: {"lr": 0.1})
    dtypes: Sequence[torch.dtype] = (torch.float64,)
    """Of the parameters, in turn."""
    seed: int = 0


@dataclass
class Played:
    """Copies of the parameters right before and after each step, on the CPU; and `state_dict` in the end."""

    parameters: list[list[Tensor]] = field(default_factory=list)
    before: list[list[Tensor]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """What happened from the step before to the end of each step."""
    group_of: list[int] = field(default_factory=list)
    """Of each parameter."""
    updated: set[int] = field(default_factory=set)
    """The parameters that had a gradient in any step."""
    wrong: list[str] = field(default_factory=list)
    """What was seen to be wrong while it was played."""
    state: dict[str, Any] = field(default_factory=dict)


Make = Callable[..., torch.optim.Optimizer]


def unsharded(params: Any, optimizer_cls: type[torch.optim.Optimizer], **defaults: Any) -> torch.optim.Optimizer:
    return optimizer_cls(params, **defaults)


def play(make: Make, script: Script, device: str) -> Played:
    played = Played()
    for _ in playing(make, script, device, played):
        pass
    return played


def play_on_rank(implementation: Implementation, script: Script, device: str) -> Played:
    return play(implementation.adapted, script, device)


def playing(make: Make, script: Script, device: str, played: Played, start: Any = None) -> Iterator[None]:
    """Fill `played`, and stop after each action; with `start`, the parameters and the state that `played_from` has."""
    draw = torch.Generator().manual_seed(script.seed)

    def new(group: Group) -> dict[str, Any]:
        params = []
        for i, shape in enumerate(group.shapes):
            dtype = script.dtypes[(len(everything) + i) % len(script.dtypes)]
            values = torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)
            values = _transposed(values) if group.transposed else values
            params.append(nn.Parameter(values, requires_grad=i not in group.frozen))
        played.group_of.extend([max(played.group_of, default=-1) + 1] * len(params))
        everything.extend(params)
        return {"params": params, **group.options}

    everything: list[nn.Parameter] = []
    groups = [new(group) for group in script.groups]
    optimizer = make(groups, script.optimizer, **script.defaults)
    if start is not None:
        _begin_from(start, optimizer, everything)
    events: list[str] = []
    saved: dict[str, Any] = {}
    for action in script.actions:
        match action:
            case Step():
                played.before.append(_copies(everything))
                _step(optimizer, action, everything, draw, played)
                played.parameters.append(_copies(everything))
                without = [i for i, p in enumerate(everything) if p.grad is None]
                events.append("step with a closure" * action.closure or "step")
                if action.freezes:
                    events[-1] += f" once parameters {list(action.freezes)} had their gradients and were frozen"
                played.events.append(", ".join(events) + f", without gradients of {without}" * bool(without))
                played.updated |= set(range(len(everything))) - set(without)
                events.clear()
            case Change():
                i = action.group % len(optimizer.param_groups)
                optimizer.param_groups[i].update(action.options)
                events.append(f"group {i}'s {_listed(action.options) or 'options'} set")
            case Add():
                optimizer.add_param_group(new(action.group))
                own = _listed(action.group.options)
                events.append(f"group {played.group_of[-1]} added with {own or 'the defaults'}")
            case Freeze(None):
                for p in everything:
                    p.requires_grad_()
                events.append("all parameters thawed")
            case Freeze():
                i = action.parameter % len(everything)
                everything[i].requires_grad_(not everything[i].requires_grad)
                events.append(f"parameter {i} {'thawed' if everything[i].requires_grad else 'frozen'}")
            case Save():
                saved = deepcopy(optimizer.state_dict())
                events.append("state saved")
            case Restore():
                if saved and len(saved["param_groups"]) == len(optimizer.param_groups):
                    optimizer.load_state_dict(deepcopy(saved))
                    played.wrong += _changed(saved, optimizer.state_dict())
                    events.append("an earlier state loaded")
            case _:
                state = deepcopy(optimizer.state_dict())
                bare = [{"params": list(group["params"])} for group in optimizer.param_groups]
                optimizer = make(bare, script.optimizer, **script.defaults | {"lr": 7.0})
                optimizer.load_state_dict(deepcopy(state))
                played.wrong += _changed(state, optimizer.state_dict())
                events.append("state loaded into a new optimizer")
        yield
    played.state = deepcopy(optimizer.state_dict())


def _step(
    optimizer: torch.optim.Optimizer, step: Step, params: list[nn.Parameter], draw: torch.Generator, played: Played
) -> None:
    """With a closure, the gradients before it are those of the step before."""
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        _set_gradients(params, step, draw)
        return 0.5 + calls

    if step.closure:
        loss = optimizer.step(closure)
        if (loss, calls) != (1.5, 1):
            played.wrong.append(f"step(closure) called the closure {calls} times, and returned {loss}, expected 1.5")
    else:
        _set_gradients(params, step, draw)
        optimizer.step()


def _copies(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in params]


def _listed(options: Options) -> str:
    return " and ".join(f"{name}={value}" for name, value in options.items())


def _changed(saved: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The first tensor of the state that loading changed, in its value or its dtype."""
    for i, values in saved["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                loaded = after["state"].get(i, {}).get(name)
                found = "nothing" if loaded is None else f"{loaded.dtype}"
                if found == str(value.dtype) and not torch.equal(loaded, value):
                    found += f", off by {(loaded.double() - value.double()).abs().max().item():.3g}"
                elif found == str(value.dtype):
                    continue
                return [f"loading changed {name!r} of parameter {i}: it was {value.dtype}, and now is {found}"]
    return []


def play_from(implementation: Implementation | None, script: Script, device: str, start: Played) -> Played:
    """From the parameters and the state that were played to; the gradients are those that come next."""
    played = Played()
    for _ in playing(unsharded if implementation is None else implementation.adapted, script, device, played, start):
        pass
    return played


def _begin_from(start: Played, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p, value in zip(params, start.parameters[-1], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(deepcopy(start.state))


def _set_gradients(params: list[nn.Parameter], step: Step, draw: torch.Generator) -> None:
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p)
        grad = _transposed(grad) if step.transposed else grad.contiguous()
        p.grad = grad if p.requires_grad and i not in step.without else None
        if i in step.freezes:
            p.requires_grad_(False)


def _transposed(x: Tensor) -> Tensor:
    """The same values, in the opposite order of dimensions in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def play_in_groups(implementation: Implementation, script: Script, device: str) -> Played:
    """Even ranks and odd ranks side by side, each with parameters and gradients of their own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(min(size, 2))]
    own = Script(script.groups, script.actions, script.optimizer, script.defaults, script.dtypes, seed=rank % 2)

    def make(params: Any, optimizer_cls: type[torch.optim.Optimizer], **defaults: Any) -> torch.optim.Optimizer:
        return implementation.adapted(params, optimizer_cls, process_group=groups[rank % 2], **defaults)

    played = play(make, own, device)
    dist.barrier()  # a rank that leaves a group while others still connect to it breaks their connections
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return played

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

from shardmark.registry import Implementation

Shape = tuple[int, ...]
Options = dict[str, Any]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


@dataclass(frozen=True)
class Group:
    """A param group: the shapes of its parameters, and its own options."""

    shapes: Sequence[Shape]
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Gradients for all parameters but those `without` one, by their index, and a step."""

    without: tuple[int, ...] = ()


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
    """Copies of the parameters right after each step, on the CPU; and `state_dict` in the end."""

    parameters: list[list[Tensor]] = field(default_factory=list)
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
        for shape in group.shapes:
            dtype = script.dtypes[(len(everything) + len(params)) % len(script.dtypes)]
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            params.append(nn.Parameter(values.to(device, dtype)))
        everything.extend(params)
        return {"params": params, **group.options}

    everything: list[nn.Parameter] = []
    groups = [new(group) for group in script.groups]
    optimizer = make(groups, script.optimizer, **script.defaults)
    if start is not None:
        _begin_from(start, optimizer, everything)
    for action in script.actions:
        if isinstance(action, Step):
            _set_gradients(everything, action.without, draw)
            optimizer.step()
            played.parameters.append([p.detach().cpu().clone() for p in everything])
        elif isinstance(action, Change):
            optimizer.param_groups[action.group % len(optimizer.param_groups)].update(action.options)
        elif isinstance(action, Add):
            optimizer.add_param_group(new(action.group))
        elif isinstance(action, Save):
            optimizer.state_dict()
        else:
            saved = deepcopy(optimizer.state_dict())
            bare = [{"params": list(group["params"])} for group in optimizer.param_groups]
            optimizer = make(bare, script.optimizer, **script.defaults | {"lr": 7.0})
            optimizer.load_state_dict(saved)
        yield
    played.state = deepcopy(optimizer.state_dict())


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


def _set_gradients(params: list[nn.Parameter], without: tuple[int, ...], draw: torch.Generator) -> None:
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p)
        p.grad = None if i in without else grad


def assert_played(ranks: Sequence[Played], expected: Played, rtol: float = 1e-10) -> None:
    """Every rank's parameters are the expected ones after every step."""
    for step, values in enumerate(expected.parameters, 1):
        for i, value in enumerate(values):
            for rank, played in enumerate(ranks):
                where = f"after step {step} parameter {i} of shape {tuple(value.shape)} on rank {rank} of {len(ranks)}"
                assert_value(where, played.parameters[step - 1][i], value, rtol)


def assert_value(where: str, found: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    """Close, in the expected shape and dtype; a failure shows the element that is furthest off."""
    assert found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{where}: {found.dtype}, expected {expected.dtype}"
    found, wide = found.double().cpu().flatten(), expected.double().cpu().flatten()
    rtol = max(rtol, 4 * torch.finfo(expected.dtype).eps) if expected.is_floating_point() else 0
    excess = (found - wide).abs() - rtol * wide.abs().clamp(min=1)
    if bool((~(excess <= 0)).any()):
        worst = int(excess.nan_to_num(torch.inf).argmax())
        wrong = int((~(excess <= 0)).sum())
        raise AssertionError(
            f"{where}: element {worst} is {found[worst].item():.9g}, expected {wide[worst].item():.9g}; "
            f"{wrong} of {wide.numel()} elements differ"
        )


def assert_state(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """The state of each parameter, by position, and its group's options, are the expected ones."""
    for key in ("state", "param_groups"):
        assert key in found, f"{where}: state_dict() has {sorted(map(str, found))}, and no {key!r}"
    mine, theirs = ([i for group in each["param_groups"] for i in group["params"]] for each in (found, expected))
    assert len(mine) == len(theirs), f"{where}: state_dict() has {len(mine)} parameters, expected {len(theirs)}"
    for i, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        values, wanted = found["state"].get(here, {}), expected["state"].get(there, {})
        names, needed = (
            sorted(k for k, v in values.items() if v is not None),
            sorted(k for k, v in wanted.items() if v is not None),
        )
        assert names == needed, f"{where}: the state of parameter {i} has {names or 'nothing'}, expected {needed}"
        for name in needed:
            x, y = (each if isinstance(each, Tensor) else torch.tensor(each) for each in (values[name], wanted[name]))
            assert_value(f"{where}: {name} of parameter {i}", x.to(y.dtype) if not y.dim() else x, y)
    for i, (group, other) in enumerate(zip(found["param_groups"], expected["param_groups"], strict=True)):
        for name, value in other.items():
            if name not in ("params", "param_names"):
                assert name in group, f"{where}: group {i} has no {name!r}"
                assert group[name] == value, f"{where}: {name!r} of group {i} is {group[name]}, expected {value}"


def play_in_groups(implementation: Implementation, script: Script, device: str) -> Played:
    """Even ranks and odd ranks side by side, each with parameters and gradients of their own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(min(size, 2))]
    own = Script(script.groups, script.actions, script.optimizer, script.defaults, script.dtypes, seed=rank % 2)

    def make(params: Any, optimizer_cls: type[torch.optim.Optimizer], **defaults: Any) -> torch.optim.Optimizer:
        return implementation.adapted(params, optimizer_cls, process_group=groups[rank % 2], **defaults)

    return play(make, own, device)

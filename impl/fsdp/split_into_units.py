"""Split a module into units: which unit each parameter belongs to. Meta modules are materialized one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from impl.distributed import broadcast_in_place
from impl.fsdp.flat_parameters import Replicated, Sharding
from impl.fsdp.units import Place, Unit
from impl.fsdp.wrapping import ParameterPolicy, Policy, choose_ignored, choose_units


def split(module: nn.Module, wrap: Policy, ignored_params: ParameterPolicy, sharding: Sharding) -> list[Unit]:
    """The module's units, the root module first, sharded one after the other; every rank gets rank 0's values.

    Ignored parameters are in the root module's unit, replicated. ValueError for a submodule on the meta device that has
    no `reset_parameters()`.
    """
    roots = choose_units(wrap, module)
    ignored = choose_ignored(ignored_params, module)
    owners = _owners(module, roots)
    for part in module.modules():
        _check_can_be_materialized(part)
    units = []
    replicated: dict[nn.Parameter, list[Place]] = {}
    for root in roots:
        parts = [part for part in owners if owners[part] is root]
        allocated = _materialize(parts, sharding.device)
        ignored |= {new for old, new in allocated.items() if old in ignored}
        for buffer in (b for part in parts for b in part.buffers(recurse=False)):
            broadcast_in_place(buffer, sharding.process_group)
        places: dict[nn.Parameter, list[Place]] = {}
        for part in parts:
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                (replicated if parameter in ignored else places).setdefault(parameter, []).append((part, name))
        if places or root is module:
            units.append(Unit(root, places, sharding))
    units[0].add(replicated, sharding, Replicated)
    return units


def device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device to compute on: `device` if given, else the module's; the default device for a meta module."""
    if device is not None:
        return torch.device(device)
    own = next(module.parameters()).device
    return torch.get_default_device() if own.type == "meta" else own


def shared_between(module: nn.Module, roots: list[nn.Module]) -> str | None:
    """The name of a parameter that several units share, or None."""
    owners = _innermost(module, roots)
    names = {p: name for name, p in module.named_parameters()}
    return next((names[p] for p, parts in _users(owners).items() if len({owners[part] for part in parts}) > 1), None)


def _owners(module: nn.Module, roots: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The unit of each submodule: the innermost around it, or the root where several units share its parameters."""
    owners = _innermost(module, roots)
    moved = True
    while moved:  # a submodule that moves to the root takes along all its parameters, which other units may share
        moved = False
        for parts in _users(owners).values():
            if len({owners[part] for part in parts}) > 1:
                owners |= dict.fromkeys(parts, module)
                moved = True
    return owners


def _innermost(module: nn.Module, roots: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The innermost unit around each submodule."""
    owners: dict[nn.Module, nn.Module] = {}

    def own(part: nn.Module, root: nn.Module) -> None:
        if part in owners:
            return
        owners[part] = root = part if part in roots else root
        for child in part.children():
            own(child, root)

    own(module, module)
    return owners


def _users(parts: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that each parameter is registered in."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for part in parts:
        for parameter in part.parameters(recurse=False):
            users.setdefault(parameter, []).append(part)
    return users


def _on_meta(part: nn.Module) -> bool:
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _check_can_be_materialized(part: nn.Module) -> None:
    if _on_meta(part) and not callable(getattr(part, "reset_parameters", None)):
        raise ValueError(
            f"a {type(part).__name__} on the meta device has no reset_parameters() to give it its initial values"
        )


def _materialize(parts: list[nn.Module], device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Allocate modules on the meta device and call their `reset_parameters()`; tied parameters stay tied. Returns
    the new parameter for each replaced one."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    on_meta: list[Any] = [part for part in parts if _on_meta(part)]
    for part in on_meta:
        for name, old in part.named_parameters(recurse=False, remove_duplicate=False):
            if old.is_meta and old not in allocated:
                allocated[old] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            part._parameters[name] = allocated.get(old, old)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
    with torch.device(device):
        for part in on_meta:
            part.reset_parameters()
    return allocated

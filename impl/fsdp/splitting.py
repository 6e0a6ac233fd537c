"""A module into units: which one each parameter belongs to; modules on the meta device are made real unit by unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from impl.fsdp.units import Place, Sharding, Unit
from impl.fsdp.wrapping import Policy, checked


def split(module: nn.Module, wrap: Policy, sharding: Sharding) -> list[Unit]:
    """The module's units, the whole first, sharded one after the other; every rank gets rank 0's values.

    ValueError for what is on the meta device and cannot be made real.
    """
    roots = checked(wrap, module)
    owners = _owners(module, roots)
    for part in module.modules():
        _check_can_be_made(part)
    units = []
    for root in roots:
        parts = [part for part in owners if owners[part] is root]
        _make(parts, sharding.device)
        for buffer in (b for part in parts for b in part.buffers(recurse=False)):
            torch.distributed.broadcast(buffer, group=sharding.process_group, group_src=0)
        places: dict[nn.Parameter, list[Place]] = {}
        for part in parts:
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(parameter, []).append((part, name))
        if places or root is module:
            units.append(Unit(root, places, sharding))
    return units


def device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where to compute: as asked, or where the module is; for one on meta, the default device."""
    if device is not None:
        return torch.device(device)
    own = next(module.parameters()).device
    return torch.get_default_device() if own.type == "meta" else own


def shared_between(module: nn.Module, roots: list[nn.Module]) -> str | None:
    """The name of a parameter that modules of several units share."""
    owners = _innermost(module, roots)
    names = {p: name for name, p in module.named_parameters()}
    return next((names[p] for p, parts in _users(owners).items() if len({owners[part] for part in parts}) > 1), None)


def _owners(module: nn.Module, roots: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The unit of each module within: the innermost around it, or the whole, where several share its parameters."""
    owners = _innermost(module, roots)
    moved = True
    while moved:  # a module that moves takes its other parameters along, which others may share
        moved = False
        for parts in _users(owners).values():
            if len({owners[part] for part in parts}) > 1:
                owners |= dict.fromkeys(parts, module)
                moved = True
    return owners


def _innermost(module: nn.Module, roots: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The innermost unit around each module within."""
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
    """Each parameter's own modules."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for part in parts:
        for parameter in part.parameters(recurse=False):
            users.setdefault(parameter, []).append(part)
    return users


def _on_meta(part: nn.Module) -> bool:
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _check_can_be_made(part: nn.Module) -> None:
    if _on_meta(part) and not callable(getattr(part, "reset_parameters", None)):
        raise ValueError(
            f"a {type(part).__name__} on the meta device has no reset_parameters(), so nothing says what is in it"
        )


def _make(parts: list[nn.Module], device: torch.device) -> None:
    """Give what is on the meta device memory and the values of its `reset_parameters()`; tied parameters stay so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    unmade: list[Any] = [part for part in parts if _on_meta(part)]
    for part in unmade:
        for name, old in part.named_parameters(recurse=False, remove_duplicate=False):
            if old.is_meta and old not in made:
                made[old] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            part._parameters[name] = made.get(old, old)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
    with torch.device(device):
        for part in unmade:
            part.reset_parameters()

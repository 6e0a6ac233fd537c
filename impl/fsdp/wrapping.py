"""Which modules become units: what is gathered at once, used, and let go again; and which are spread already.

A policy is given the whole module and returns those of its parts that become units; the whole is one in any case, and
holds the parameters of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

from torch import nn
from torch.distributed.tensor import DTensor

Policy = Callable[[nn.Module], Sequence[nn.Module]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward, so that nothing would say when their parameters are used."""


def by_type(*types: type[nn.Module]) -> Policy:
    """The outermost parts of those types: of `by_type(Block, nn.Linear)`, linears outside of blocks only."""
    if not types or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in types):
        raise ValueError(f"by_type takes nn.Module classes, got {types}")

    def policy(module: nn.Module) -> list[nn.Module]:
        chosen: list[nn.Module] = []
        for child in module.children():
            chosen += [child] if isinstance(child, types) else policy(child)
        return chosen

    return policy


LINEARS_AND_EMBEDDINGS = by_type(nn.Linear, nn.Embedding)
"""The smallest units that pay: nearly all parameters of a language model are in these."""


def by_size(min_parameters: int) -> Policy:
    """The innermost parts that hold at least that many parameters which are in no other unit."""
    if not (isinstance(min_parameters, int | float) and min_parameters >= 1):
        raise ValueError(f"by_size takes a number of parameters from 1 on, got {min_parameters!r}")

    def policy(module: nn.Module) -> list[nn.Module]:
        chosen: list[nn.Module] = []

        def left(part: nn.Module) -> int:
            """How many parameters of `part` are in no unit."""
            count = sum(p.numel() for p in part.parameters(recurse=False)) + sum(map(left, part.children()))
            if count < min_parameters or part is module or isinstance(part, _CONTAINERS):
                return count
            chosen.append(part)
            return 0

        left(module)
        return chosen

    return policy


def whole(module: nn.Module) -> list[nn.Module]:
    """No parts: the whole module is the one unit."""
    return []


def checked(policy: Policy, module: nn.Module) -> list[nn.Module]:
    """The policy's units with the whole first, each once; ValueError for what cannot be one."""
    inside = set(module.modules())
    for part in (parts := list(dict.fromkeys(policy(module)))):
        if part not in inside:
            raise ValueError(f"the wrapping policy chose a {type(part).__name__} that is not part of the module")
        if isinstance(part, _CONTAINERS):
            raise ValueError(f"a {type(part).__name__} has no forward, so it cannot be a unit: wrap what is in it")
    return [module, *(part for part in parts if part is not module)]


_spread: WeakSet[nn.Module] = WeakSet()


def check_plain(module: nn.Module) -> None:
    """ValueError for a module of which a part is spread over ranks already, by one of ours or by `fully_shard`."""
    for name, part in module.named_modules():
        if part in _spread or any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False)):
            where = f", at {name!r}" if name else ""
            raise ValueError(
                f"this {type(module).__name__} is spread over ranks already{where}: it takes a plain module, once"
            )


def mark_spread(module: nn.Module) -> None:
    """From now on `check_plain` refuses the module, its parts, and what they are put in."""
    _spread.update(module.modules())

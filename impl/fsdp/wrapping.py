"""Which modules become units, whose parameters are all-gathered together; which parameters are replicated; and which
modules are sharded already.

A policy takes the root module and returns the submodules that become units, or the parameters that are replicated. The
root module is always a unit, too: it holds the parameters that are in no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from weakref import WeakSet

from torch import nn
from torch.distributed.tensor import DTensor

Policy = Callable[[nn.Module], Sequence[nn.Module]]
ParameterPolicy = Callable[[nn.Module], Collection[nn.Parameter]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: nothing says when to gather their parameters."""


def by_type(*types: type[nn.Module]) -> Policy:
    """Policy: the outermost submodules of those types. `by_type(Block, nn.Linear)` gives blocks, and linears outside
    of them."""
    if not types or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in types):
        raise ValueError(f"by_type takes nn.Module classes, got {types}")

    return partial(_outermost, lambda part: isinstance(part, types))


def with_blocks(blocks: Collection[nn.Module] | nn.ModuleList) -> Policy:
    """Policy: `blocks` are units, and so are the outermost linears and embeddings outside of them, unless they share a
    parameter with another module: these stay in the root, as a tied parameter must lie in one unit. One that is tied to
    a block's lies in two."""

    def policy(module: nn.Module) -> list[nn.Module]:
        places = Counter(p for part in module.modules() for p in part.parameters(recurse=False))

        def is_chosen(part: nn.Module) -> bool:
            is_small = isinstance(part, nn.Linear | nn.Embedding)
            return part in blocks or (is_small and all(places[p] == 1 for p in part.parameters()))

        return _outermost(is_chosen, module)

    return policy


def _outermost(chosen: Callable[[nn.Module], bool], module: nn.Module) -> list[nn.Module]:
    return [part for child in module.children() for part in ([child] if chosen(child) else _outermost(chosen, child))]


LINEARS_AND_EMBEDDINGS = by_type(nn.Linear, nn.Embedding)
"""The smallest units that pay off: they hold nearly all parameters of a language model."""


def by_size(min_parameters: int) -> Policy:
    """Policy: the innermost submodules that hold at least that many parameters outside of units inside them."""
    if not (isinstance(min_parameters, int | float) and min_parameters >= 1):
        raise ValueError(f"by_size takes a number of parameters from 1 on, got {min_parameters!r}")

    def policy(module: nn.Module) -> list[nn.Module]:
        chosen: list[nn.Module] = []

        def remaining(part: nn.Module) -> int:
            """Choose units inside `part`; return how many of its parameters are in no unit."""
            count = sum(p.numel() for p in part.parameters(recurse=False)) + sum(map(remaining, part.children()))
            if count < min_parameters or part is module or isinstance(part, _CONTAINERS):
                return count
            chosen.append(part)
            return 0

        remaining(module)
        return chosen

    return policy


def whole(module: nn.Module) -> list[nn.Module]:
    """Policy: no submodules, so the root module is the only unit."""
    return []


def norms_and_biases(module: nn.Module) -> list[nn.Parameter]:
    """Policy: replicate parameters with fewer than two dimensions, which are many but hold few of the model's
    elements."""
    return [parameter for parameter in module.parameters() if parameter.ndim < 2]


def no_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Policy: replicate no parameters."""
    return []


def choose_ignored(policy: ParameterPolicy, module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that the policy replicates; ValueError if it chooses one that is not the module's."""
    own, chosen = set(module.parameters()), set(policy(module))
    if foreign := chosen - own:
        raise ValueError(f"ignored_params chose {len(foreign)} of {len(chosen)} that are not parameters of the module")
    return chosen


def choose_units(policy: Policy, module: nn.Module) -> list[nn.Module]:
    """Return the root module, then the policy's choice, each once; ValueError for a choice that cannot be a unit."""
    inside = set(module.modules())
    for part in (parts := list(dict.fromkeys(policy(module)))):
        if part not in inside:
            raise ValueError(f"the wrapping policy chose a {type(part).__name__} that is not part of the module")
        if isinstance(part, _CONTAINERS):
            raise ValueError(f"a {type(part).__name__} has no forward, so it cannot be a unit: wrap what is in it")
    return [module, *(part for part in parts if part is not module)]


_sharded: WeakSet[nn.Module] = WeakSet()


def check_unsharded(module: nn.Module) -> None:
    """Raise ValueError if a part of the module is sharded already, by this family's wrappers or by `fully_shard`."""
    for name, part in module.named_modules():
        if part in _sharded or any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False)):
            where = f", at {name!r}" if name else ""
            raise ValueError(
                f"this {type(module).__name__} is sharded over ranks already{where}: give it an unsharded module"
            )


def mark_sharded(module: nn.Module) -> None:
    """Make `check_unsharded` refuse the module, its submodules, and any module that contains one of them."""
    _sharded.update(module.modules())

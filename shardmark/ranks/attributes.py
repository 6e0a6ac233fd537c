"""Functions and classes that a call has replaced in the modules of PyTorch, NumPy and Python, and puts back.

A patched `torch.distributed.all_reduce` or `random.random` would change the results of the next test. Each module of
these packages is compared with what it held at the last look. Other attributes are caches and settings; the settings
that matter are in `shardmark.ranks.process_settings` and `shardmark.ranks.torch_settings`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn

PACKAGES = {"torch", "numpy", "triton"} | sys.stdlib_module_names
"""Packages whose modules are compared, as far as they have been imported."""

COMPILERS = {
    *(
        "_dynamo",
        "_inductor",
        "_functorch",
        "_higher_order_ops",
        "_subclasses",
        "_refs",
        "_prims",
        "_decomp",
        "_native",
    ),
    *("_meta_registrations", "_numpy", "fx", "jit", "onnx", "export", "package", "ao", "testing"),
}
"""PyTorch's packages that trace, compile and export: half of all its functions, of which a step calls none."""

WITH_CLASSES = (torch, nn, torch.optim, torch.autograd, torch.utils.data, dist, np)
"""Modules whose classes are compared as well, attribute by attribute."""


class Attributes:
    """The attributes of modules and classes as they are now; `put_back` compares."""

    def __init__(
        self,
        is_compared: Callable[[str], bool] | None = None,
        classes_in: Callable[[ModuleType], list[type]] | None = None,
    ) -> None:
        self._is_compared = is_compared or _is_compared
        self._classes_in = classes_in
        self._before: dict[Any, dict[str, Any]] = {}
        self._modules = 0

    def look(self, again: bool = False) -> None:
        """Take modules imported since the last look as they are; `again`, take everything as it is."""
        if again:
            self._before.clear()
        elif self._modules == len(sys.modules):
            return
        self._modules = len(sys.modules)
        for name, module in [*sys.modules.items()]:
            if self._is_compared(name) and isinstance(module, ModuleType) and module not in self._before:
                self._before[module] = vars(module).copy()
                if self._classes_in is not None:
                    self._before |= {each: dict(vars(each)) for each in self._classes_in(module)}
        for module in WITH_CLASSES if self._classes_in is None else ():
            for each in vars(module).values():
                if issubclass(type(each), type) and each not in self._before:
                    self._before[each] = dict(vars(each))

    def accept(self) -> None:
        """Take everything that has changed as it is."""
        for owner in self._changed():
            self._before[owner] = dict(vars(owner))

    def put_back(self) -> list[str]:
        """Restore every function and class, and return the names of those that had changed."""
        changed = []
        for owner in self._changed():
            before = self._before[owner]
            for name in _replaced(owner, before, vars(owner)):
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
                changed.append(f"{getattr(owner, '__name__', owner)}.{name}")
            self._before[owner] = dict(vars(owner))
        return changed

    def _changed(self) -> list[Any]:
        """Owners that hold something else, or in another order."""
        same = operator.is_
        return [
            owner
            for owner, before in self._before.items()
            if len(now := owner.__dict__) != len(before) or not all(map(same, now.values(), before.values()))
        ]


def _is_compared(module: str) -> bool:
    package, *inside = module.split(".", 2)
    return package in PACKAGES and not (package == "torch" and inside and inside[0] in COMPILERS)


def _replaced(owner: Any, before: dict[str, Any], now: Any) -> list[str]:
    """Names of functions and classes that are others now, or gone; of a class, also new ones that hide inherited
    ones."""
    found = [name for name, value in before.items() if now.get(name) is not value and _is_function(value)]
    if isinstance(owner, type):
        found += [name for name in now.keys() - before.keys() if any(name in vars(c) for c in owner.mro()[1:])]
    return [name for name in found if not _is_pytorchs_doing(owner, name)]


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod))


def _is_pytorchs_doing(owner: Any, name: str) -> bool:
    """Whether PyTorch itself changes the attribute: with the default dtype, the compiler, or the first optimizer of a
    class."""
    if owner is torch or owner is nn.Module:
        return name == "Storage" or name.startswith("__")
    now = vars(owner).get(name)
    return hasattr(now, "hooked") or hasattr(now, "_torchdynamo_disable")

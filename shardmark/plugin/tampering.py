"""Changes that a target makes to its judge: to functions and classes of the suite and of pytest, and to the exit.

A target is code that someone, or something, wrote to be judged right. Its import and its calls share a process with the
tests, so whatever they replace there is put back, and named. `correctness.support.unwatched` judges it in a process of
its own as well.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

from shardmark.ranks.attributes import Attributes

PACKAGES = frozenset({"impl", "shardmark", "correctness", "pytest", "_pytest", "pluggy", "hypothesis", "unittest"})
COMPARING = ("allclose", "equal", "isclose")
"""PyTorch's functions by which tests compare."""
OF_EACH_TEST = frozenset({"_pytest.assertion.util"})
"""Modules in which pytest itself replaces functions for each test."""
MODULES = frozenset({"torch.testing", "torch.testing._comparison"})


class Guard(Attributes):
    """The judge's modules and classes as they are at `look`; with `plugins`, those of pytest as well."""

    def __init__(self, plugins: pytest.PytestPluginManager | None = None) -> None:
        super().__init__(_is_the_judges, _classes_in)
        self._plugins = plugins
        self._targets: set[str] = set()
        self._comparing = {name: getattr(torch, name) for name in COMPARING}

    def watch(self, target: Any) -> None:
        """Take no plugin from the target's module; that of a plain namespace is its functions'."""
        parts = [target, *getattr(target, "__dict__", {}).values()]
        self._targets |= {module for each in parts if isinstance(module := getattr(each, "__module__", None), str)}

    def put_back(self) -> list[str]:
        changed = super().put_back()
        for name, function in self._comparing.items():
            if getattr(torch, name) is not function:
                setattr(torch, name, function)
                changed.append(f"torch.{name}")
        for plugin in [] if self._plugins is None else self._plugins.get_plugins():
            if self._targets & {getattr(plugin, "__name__", ""), type(plugin).__module__}:
                assert self._plugins is not None
                self._plugins.unregister(plugin)
                changed.append("pytest's plugins")
        return changed


def _is_the_judges(module: str) -> bool:
    return (module.partition(".")[0] in PACKAGES and module not in OF_EACH_TEST) or module in MODULES


def _classes_in(module: ModuleType) -> list[type]:
    """The classes that a module of the judge defines; PyTorch's own are not compared."""
    name = module.__name__
    own = [each for each in vars(module).values() if isinstance(each, type)]
    return [] if name in MODULES else [each for each in own if each.__module__ == name]


@contextmanager
def untouched(found: list[str]) -> Iterator[None]:
    """Put back what the block changes of the judge, and add its names to `found`."""
    with suppress(ImportError):  # the tests import it later
        importlib.import_module("hypothesis")
    guard = Guard()
    guard.look()
    try:
        yield
    finally:
        found += guard.put_back()


@cache  # once in a process, which may run pytest several times
def keep_the_exit() -> None:
    """Have `os._exit`, which leaves no verdict, end this process with a line and another status than 0."""
    leave, owner = os._exit, os.getpid()

    def leave_with_a_line(status: int) -> NoReturn:
        if os.getpid() == owner:
            os.write(2, b"ERROR: os._exit() was called before the verdict: nothing is judged\n")
            status = status or 1
        leave(status)

    os._exit = leave_with_a_line

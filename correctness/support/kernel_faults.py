"""Plant a fault in a kernel's source, for attention, loss and optim: the accuracy check must fail on it."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def every_fourth(faults: Iterable[str]) -> list[Any]:
    """Parametrize: every fourth fault runs by default, the others in the sweep."""
    return [pytest.param(name, marks=pytest.mark.sweep if i % 4 else ()) for i, name in enumerate(faults)]


def with_fault(module: ModuleType, folder: Path, right: str, wrong: str) -> ModuleType:
    """Import a copy of the module with `wrong` in place of `right`, from a file in `folder`, where Triton can read
    it."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert right in source, f"the kernels no longer contain {right!r}"
    path = folder / "wrong.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"wrong_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty

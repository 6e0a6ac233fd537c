"""Selects the tests of correctness/ that run by default; the others run in the sweep (`-m "sweep or not sweep"`)."""

import os
from typing import Any

import pytest

from correctness.support.paths import ROOT
from impl.interpreting import requires_triton
from shardmark.api import requires_compiler
from shardmark.api.mesh import Mesh
from shardmark.plugin.session import SESSION, Session

MOST_RANKS_BRIEFLY = 2
"""Implementations registered with `tested_briefly` run on more ranks only in the sweep, or where the user asks for
numbers of ranks."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Set the number of random examples from the mark `examples`: by default, for a family of `--impl`, or in the
    sweep."""
    mark, family = (metafunc.definition.get_closest_marker(name) for name in ("examples", "family"))
    if mark is not None and family is not None:
        each_time, judged, many = mark.args
        chosen = family.args[0] in metafunc.config.stash[SESSION].selected
        numbers = [judged if chosen else each_time, pytest.param(many, marks=pytest.mark.sweep)]
        metafunc.parametrize("examples", numbers)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests as part of the sweep, and deselect the sweep unless `-m` names it."""
    for item in items:
        if item.path.is_relative_to(ROOT / "correctness") and hasattr(item, "callspec"):
            implementation = item.callspec.params.get("implementation")
            session = config.stash[SESSION]
            selected = getattr(implementation, "family", None) in session.selected
            repeated = _is_repeated(item, implementation, session)
            if _is_slow(item, implementation) or (not selected and repeated):
                item.add_marker(pytest.mark.sweep)
    deselect_sweep(config, items)


def deselect_sweep(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `sweep`, unless `-m` names the mark."""
    if "sweep" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("sweep")])
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def _is_slow(item: Any, implementation: Any) -> bool:
    """Return True if it compiles, which takes seconds per shape, or interprets a large case."""
    requires = getattr(implementation, "requires", ())
    if requires_compiler in requires:
        every_time = item.get_closest_marker("compiled_every_time")
        return every_time is None or not item.callspec.id.endswith(every_time.args or "")
    return _is_interpreted(implementation) and item.get_closest_marker("large") is not None


def _is_interpreted(implementation: Any) -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and requires_triton in getattr(implementation, "requires", ())


def _is_repeated(item: Any, implementation: Any, session: Session) -> bool:
    """Return True if another implementation or case covers the same by default, or it is marked `long` and this one is
    interpreted; `--impl` still runs it."""
    briefly = getattr(implementation, "tested_briefly", False)
    marks = {mark.name for mark in item.iter_markers()}
    brief = briefly and (is_on_many_ranks(item, session) or bool(marks & {"large", "long", "examples"}))
    return brief or "judged" in marks or ("long" in marks and _is_interpreted(implementation))


def is_on_many_ranks(item: Any, session: Session) -> bool:
    """Return True if the test runs on more ranks than some implementations do by default, and the user has not asked
    for numbers of ranks."""
    mesh, world = (item.callspec.params.get(name) for name in ("mesh", "world"))
    size = mesh.size if isinstance(mesh, Mesh) else world  # pytest's "not set", where a test has no mesh of that size
    return isinstance(size, int) and size > MOST_RANKS_BRIEFLY and not session.ranks_are_chosen

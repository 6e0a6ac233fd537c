"""Fixtures of the tests of worlds; what is left to the sweep; the table of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardmark.report.tables import layout
from shardmark.world import World, available_ranks

COMPILED_EVERY_TIME = ("fewer_keys-torch.float32-causal", "tile_and_one-torch.bfloat16-full", "derivative", "one_line")
"""Tests of `compiled` and `flex`, by a part of their names, not left to the sweep: each new shape takes seconds."""


@pytest.hookimpl(tryfirst=True)  # before the sweep is deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what is compiled anew for each test to the sweep."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        every_time = any(part in item.name for part in COMPILED_EVERY_TIME)
        if str(parameters.get("implementation")) in ("compiled", "flex") and not every_time:
            item.add_marker(pytest.mark.sweep)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each compiled kernel takes of its chip, where tests say so."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, [])]
    rows = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "kernel"]
    if rows:
        terminalreporter.section("What does each kernel take of its chip?", sep="-")
        for line in layout([{name: str(value) for name, value in row.items()} for row in rows], left=("case",)):
            terminalreporter.write_line(line)


@pytest.fixture
def pair(device: str) -> Iterator[World]:
    """A world of two that the test may break."""
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    with World(2, device) as world:
        yield world

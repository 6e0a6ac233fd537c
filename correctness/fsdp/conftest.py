"""Which implementations are tested every time: of PyTorch's own, one of each kind; the rest are in the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.session import SESSION

EVERY_TIME = ("sharded_plain", "sharded", "sharded_kept", "simple", "fsdp1", "fsdp2")
AT_EVERY_SIZE = ("sharded", "simple")
"""Of more than two ranks, too."""
FOR_ALL = "test_twenty_steps"
"""The test that every implementation runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a user names with --impl is tested in full."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = getattr(parameters.get("implementation"), "name", None)
        if name is None or not item.path.is_relative_to(Path(__file__).parent):
            continue
        small = parameters.get("world", 2) <= 2
        often = name in AT_EVERY_SIZE or (small and (name in EVERY_TIME or FOR_ALL in item.name))
        if "fsdp" not in config.stash[SESSION].selected and not often:
            item.add_marker(pytest.mark.sweep)

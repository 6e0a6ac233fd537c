"""Runs one implementation of each kind by default, and `sharded` on any number of ranks; the rest is marked sweep."""

from pathlib import Path

import pytest

from correctness.support.exact import pytest_pyfunc_call as pytest_pyfunc_call
from correctness.support.sweep import is_on_many_ranks
from shardmark.plugin.session import SESSION

EVERY_TIME = ("sharded", "simple", "fsdp2")
AT_EVERY_SIZE = "sharded"
FOR_ALL, MODEL = ("test_twenty_steps", "test_every_option"), "tied_and_frozen"
"""In these tests every implementation runs with that model on two ranks; `sharded` alone runs with the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rest as sweep, unless `--impl` names this family: then all of it runs."""
    session = config.stash[SESSION]
    if "fsdp" in session.selected:
        return
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = getattr(parameters.get("implementation"), "name", None)
        if name is None or not item.path.is_relative_to(Path(__file__).parent):
            continue
        every_time = parameters["name"] == MODEL if item.name.startswith(FOR_ALL) else name in EVERY_TIME
        if not (name == AT_EVERY_SIZE or (every_time and not is_on_many_ranks(item, session))):
            item.add_marker(pytest.mark.sweep)

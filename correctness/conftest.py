"""Fixtures of the tests of worlds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardmark.world import World, available_ranks


@pytest.fixture
def pair(device: str) -> Iterator[World]:
    """A world of two that the test may break."""
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    with World(2, device) as world:
        yield world

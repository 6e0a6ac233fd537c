"""Checks that find lines, each about one thing that is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

SHOWN = 3


def assert_none(wrong: Iterable[str]) -> None:
    """Fail with the first lines, if there are any."""
    if lines := [*wrong]:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        pytest.fail("\n".join([*lines[:SHOWN], *more]), pytrace=False)

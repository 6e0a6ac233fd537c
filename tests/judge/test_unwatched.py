"""Right implementations are right in processes of their own, too."""

import pytest

from correctness.support.paths import ROOT
from shardmark.api import FAMILIES
from tests.support.runs import Fresh

FEW = ("loss",)
"""Tried each time."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FEW else pytest.mark.sweep) for name in FAMILIES]
)
def test_the_reference_is_right_unwatched(family: str) -> None:
    owner = FAMILIES[family]
    target = owner.implementations[owner.reference].target
    target = getattr(target, "func", target)  # of functools.partial
    arguments = [
        f"correctness/{owner.folder}/test_unwatched.py",
        f"--impl={family}={target.__module__}:{target.__qualname__}",
    ]
    ended = Fresh(ROOT, [*arguments, "-n0", "-p", "no:cacheprovider"]).run()
    assert "1 passed" in ended.output and " failed" not in ended.output, ended.output

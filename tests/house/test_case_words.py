"""No two cases of a grid have the same words: a sentence names its case by them alone."""

import importlib
from pathlib import Path

import pytest

from shardmark.api import Grid

PERF = Path(__file__).parents[2] / "perf"
GRIDS = [
    (path.stem, name, scale)
    for path in sorted(PERF.glob("test_*.py"))
    for name, grid in vars(importlib.import_module(f"perf.{path.stem}")).items()
    if isinstance(grid, Grid)
    for scale in ("smoke", "laptop", "paper", "full")
]


@pytest.mark.parametrize(("module", "name", "scale"), GRIDS)
def test_the_words_of_each_case_are_its_own(module: str, name: str, scale: str) -> None:
    """A ladder's cases name their implementation, which a sentence names as well."""
    grid = getattr(importlib.import_module(f"perf.{module}"), name)
    cases = {str(getattr(case, "case", case)): getattr(case, "case", case) for case in grid.at(scale)}
    found = [(getattr(case, "step", None), case.words) for case in cases.values() if getattr(case, "words", "")]
    assert len(set(found)) == len(found)

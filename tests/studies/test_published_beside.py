"""Beside published figures stand rows of ours that there are, and predictions as they are made."""

import re
from importlib import import_module
from itertools import product

import pytest

from perf.published import beside, rows_of
from shardmark.api.registry import family
from shardmark.report.plots import Points
from studies.published import predicted

QUESTIONS = {
    "ATTENTION": ("attention", "MEMORY"),
    "FLASH_ATTENTION": ("attention", "LENGTHS"),
    "ALL_REDUCE": ("collectives", "SIZES"),
    "DATA_PARALLEL": ("data_parallel", "CASES"),
    "SHARDED_OPTIMIZER": ("sharded_optimizer", "CASES"),
}
"""By plot: the family, whose questions are in a file of that name, and the grid."""
OTHERS = {f"backend all_reduce-1000MB {ranks}" for ranks in (2, 4, 6)}
"""Rows that the full grid has in other sizes: 1,024 MB."""


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_full_grid_has_the_rows_of_published_sizes(name: str) -> None:
    of, grid = QUESTIONS[name]
    plot: Points = getattr(beside, name)
    full = getattr(import_module(f"perf.test_{of}"), grid).at("full")
    cases = product(family(of).implementations, full, (1, 2, 4, 6))
    rows = [f"{implementation} {case} {ranks}" for implementation, case, ranks in cases]
    wanted = {each.row for each in plot.published if each.row}
    assert wanted and {row for row in wanted if not any(re.fullmatch(row, each) for each in rows)} <= OTHERS
    assert all(each.metric in plot.units for each in plot.published)
    assert len({(each.case, each.hardware, each.metric) for each in plot.published}) == len(plot.published)


def test_each_prediction_is_of_a_published_figure() -> None:
    keys = [(row["file"], row["experiment"], row["case"], row["metric"]) for row in rows_of("predicted")]
    assert len(keys) == len(set(keys))
    for file, *key in keys:
        assert any([row["experiment"], row["case"], row["metric"]] == key for row in rows_of(file)), key


@pytest.mark.sweep
def test_predictions_are_what_is_predicted() -> None:
    assert predicted.FILE.read_text(encoding="utf-8") == predicted.text()

"""Published step times beside predicted ones: all rows are there, and the errors of those held out are small."""

from collections import defaultdict
from itertools import combinations
from math import log
from statistics import median, quantiles

import pytest

from shardmark.predict.simulation.rates import RATIO_WITHIN, WITHIN
from studies.published import times_page
from studies.published.rules import why_unknown
from studies.published.time_rows import FILES, UNKNOWN, Compared, compared, fitted_cases, reading_of, repeated, rows


@pytest.mark.parametrize("file", FILES)
def test_every_published_time_is_predicted_or_listed_with_a_reason(file: str) -> None:
    for row in rows(file):
        assert (reading_of(file, row) is None) == bool(why_unknown(row, UNKNOWN)), row


@pytest.mark.parametrize("file", ["cs336_a100", "cs336_stanford336"])
def test_either_half_has_about_as_many_configurations(file: str) -> None:
    cases = {row["case"] for row in rows(file) if reading_of(file, row) is not None}
    assert 0.4 < len(fitted_cases(file)) / len(cases) < 0.6


def test_a_table_that_shows_a_figure_again_counts_it_once() -> None:
    again = [row for index, row in enumerate(rows("cs336_a100")) if index in repeated("cs336_a100")]
    assert {row["experiment"] for row in again} == {"mixed precision, batch 4"}


def every() -> list[Compared]:
    """All predicted rows."""
    return [each for file in FILES for each in compared(file)]


@pytest.mark.sweep
def test_the_median_error_of_the_rows_held_out_is_at_most_a_tenth() -> None:
    assert median(abs(each.error) for each in every() if not each.fitted) <= 0.1


@pytest.mark.sweep
def test_nine_of_ten_published_times_that_were_held_out_lie_within_the_interval() -> None:
    ratios = [each.published / each.predicted for each in every() if not each.fitted]
    low, high = WITHIN
    assert sum(low <= ratio <= high for ratio in ratios) >= 0.9 * len(ratios)


def test_nine_of_ten_ratios_of_held_out_times_on_one_gpu_are_right_within_the_factor() -> None:
    """By the page's own rows: pairs of one table, GPU and part whose published times differ by less than 1.5 times."""
    tables: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    source = experiment = ""
    for line in times_page.PAGE.read_text(encoding="utf-8").partition("## Not held")[0].splitlines():
        if line.startswith("#"):
            source, experiment = (line, "") if line.startswith("## ") else (source, line)
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 8 and cells[5][:1] in ("+", "-") and cells[5].endswith("%") and not cells[7]:
            tables[source, experiment, cells[1], cells[2]].append((float(cells[3].split()[0]), float(cells[5][:-1])))
    off = [
        abs(log((100 + one) / (100 + other)))
        for rows in tables.values()
        for (a, one), (b, other) in combinations(rows, 2)
        if abs(log(a / b)) < log(1.5)
    ]
    assert len(off) > 100
    assert quantiles(off, n=10)[-1] == pytest.approx(log(RATIO_WITHIN), abs=0.02)


@pytest.mark.sweep
def test_no_published_time_is_below_the_lower_bound() -> None:
    for each in every():
        assert each.at_least <= each.published, (each.row, each.at_least)


@pytest.mark.sweep
def test_the_page_is_that_of_the_rows() -> None:
    assert times_page.PAGE.read_text(encoding="utf-8") == times_page.page()

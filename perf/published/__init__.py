"""Figures that others have published, as questions hand them to the page, where they stand hollow beside ours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from shardmark.report.plots import Published

# training_steps.csv has columns of its own: whole training steps of language models, with what each of 30 sources says
# of its hardware and program, empty where it does not. `studies.published.step_rows` reads it.
# predicted.csv has the figures that are predicted for the programs and the hardware of published ones, in seconds and
# bytes; `python -m studies.published` writes it.
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 2**20, "GiB": 2**30, "GB": 1e9}

CHIPS = {"V100": "v100-32gb", "A100": "a100-80gb", "H100": "h100-80gb"}

Row = dict[str, str]
"""A published row, by the names of its columns."""
Counterpart = tuple[str, str, str]
"""The metric's name in the plot; a regular expression of "implementation case ranks" for our row of the same sizes,
empty if there is none; and where in that row the figure is."""


def rows_of(file: str) -> Iterator[Row]:
    """Each row of that file, by the names of its columns."""
    with (Path(__file__).parent / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
        yield from csv.DictReader(lines)


def published(
    file: str,
    experiment: str,
    case: str = "",
    among: bool = True,
    ours: Callable[[Row], Counterpart | None] = lambda row: (row["metric"].partition(" (")[0], "", ""),
) -> tuple[Published, ...]:
    """Those of the file whose experiment begins so, and whose case does or, with `among` false, does not; without those
    that have no counterpart in `ours`."""
    return tuple(
        Published(
            row["source"],
            row["hardware"],
            row["case"],
            metric,
            float(row["value"]) * UNITS[row["unit"]],
            *_predicted().get((file, row["experiment"], row["case"], row["metric"]), (_on(row), None)),
            *place,
        )
        for row in rows_of(file)
        if row["experiment"].startswith(experiment) and row["case"].startswith(case) == among
        for metric, *place in filter(None, [ours(row)])
    )


def _on(row: Row) -> str:
    """The known hardware of a figure that is not predicted; empty if its chip is not named."""
    return next((name for chip, name in CHIPS.items() if chip in row["hardware"]), "")


@cache
def _predicted() -> dict[tuple[str, ...], tuple[str, float]]:
    """(hardware, seconds or bytes) by file, experiment, case and metric."""
    return {
        (row["file"], row["experiment"], row["case"], row["metric"]): (row["on"], float(row["predicted"]))
        for row in rows_of("predicted")
    }

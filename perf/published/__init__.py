"""Figures that others have published, as questions hand them to the page, where they stand hollow beside ours."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from shardmark.report.plots import Published

# training_steps.csv has columns of its own: whole training steps of language models, with what each of 30 sources says
# of its hardware and program, empty where it does not. `studies.published.step_rows` reads it.
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 2**20, "GiB": 2**30, "GB": 1e9}


def rows_of(file: str) -> Iterator[dict[str, str]]:
    """Each row of that file, by the names of its columns."""
    with (Path(__file__).parent / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
        yield from csv.DictReader(lines)


def published(file: str, experiment: str, case: str = "", among: bool = True) -> tuple[Published, ...]:
    """Those of the file whose experiment begins so, and whose case does or, with `among` false, does not."""
    return tuple(
        Published(
            row["source"],
            row["hardware"],
            row["case"],
            row["metric"].partition(" (")[0],
            float(row["value"]) * UNITS[row["unit"]],
        )
        for row in rows_of(file)
        if row["experiment"].startswith(experiment) and row["case"].startswith(case) == among
    )

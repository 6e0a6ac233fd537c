"""Figures that others have published, as questions hand them to the page, where they stand hollow beside ours."""

from __future__ import annotations

import csv
from pathlib import Path

from shardmark.report.plots import Published

UNITS = {"ms": 1e-3, "s": 1.0, "MiB": 2**20, "GiB": 2**30, "GB": 1e9}


def published(file: str, experiment: str, case: str = "", among: bool = True) -> tuple[Published, ...]:
    """Those of the file whose experiment begins so, and whose case does or, with `among` false, does not."""
    with (Path(__file__).parent / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
        return tuple(
            Published(
                row["source"],
                row["hardware"],
                row["case"],
                row["metric"].partition(" (")[0],
                float(row["value"]) * UNITS[row["unit"]],
            )
            for row in csv.DictReader(lines)
            if row["experiment"].startswith(experiment) and row["case"].startswith(case) == among
        )

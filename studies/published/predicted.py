"""Predictions of published figures, as the questions of `perf` show them: perf/published/predicted.csv."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from studies.published import memory_rows, time_rows

FILE = Path("perf/published/predicted.csv")


def text() -> str:
    """One line for each published figure that is predicted, in seconds or bytes."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["file", "experiment", "case", "metric", "on", "predicted"])
    for file in time_rows.FILES:
        found = [(each.row, each.reading.on, each.predicted) for each in time_rows.compared(file)]
        found += [(each.row, each.on, each.predicted) for each in memory_rows.compared(file)]
        for row, on, predicted in found:
            writer.writerow([file, row["experiment"], row["case"], row["metric"], on, f"{predicted:.6g}"])
    return lines.getvalue()

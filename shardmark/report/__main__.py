"""A report from saved runs.

python -m shardmark.report old.json new.json -o out.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardmark.report.output import Report, ReportError
from shardmark.rows.atomic_json import RowFileError
from shardmark.rows.reader import RunFileError, read_run

USAGE = 4
"""The exit status of what a user got wrong, as pytest's."""


def main(arguments: Sequence[str]) -> int:
    """Write the report, and print its path; or say in one line why not, with exit status 4."""
    parser = argparse.ArgumentParser("python -m shardmark.report", description="A page, or Markdown, of saved runs.")
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="run.json",
        help="what --benchmark-json wrote; the report is of the last, and of what has changed since those before it",
    )
    parser.add_argument("-o", "--output", required=True, metavar="out.html", help="the page, or out.md")
    given = parser.parse_args(arguments)
    try:
        runs = [(path.name, read_run(path)) for path in given.runs]
        report = Report(Path(given.output), "-o")
        try:
            report.write(runs)
        finally:
            report.close()
    except (RunFileError, RowFileError, ReportError) as error:
        print(f"python -m shardmark.report: {error}", file=sys.stderr)
        return USAGE
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

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
"""Exit status of a user's error, the same as pytest's."""


def main(arguments: Sequence[str]) -> int:
    """Write the report and print its path. An error of the user is one line on stderr and exit status 4."""
    parser = argparse.ArgumentParser(
        "python -m shardmark.report", description="Write a page, or Markdown, of saved runs."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="run.json",
        help="files that --benchmark-json wrote; the report shows the last one, and what changed since each other one",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="out.html", help="file to write: a page (.html) or Markdown (.md)"
    )
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

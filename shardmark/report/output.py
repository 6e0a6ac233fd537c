"""The file of a report: checked before anything is measured, written at once."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from shardmark.report.markdown import COMMENT, markdown
from shardmark.rows.atomic_json import Entry, GrowingFile, dumped
from shardmark.rows.comparison import Compared

NEEDED = ("altair", "jinja2", "vl_convert")
"""Modules that draw a page."""


class ReportError(ValueError):
    """A report that cannot be made; the message is one line."""


class Report:
    """A page (`.html`) or Markdown (`.md`) at `path`; figures that others have published get a page beside it.

    Raises ReportError for another suffix or a missing library, RowFileError where the path cannot be written.
    """

    def __init__(self, path: Path, option: str = "--report") -> None:
        if path.suffix not in (".html", ".md"):
            raise ReportError(f"{option} {path}: expected a page (.html) or Markdown (.md)")
        if path.suffix == ".html" and (missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]):
            raise ReportError(f"{option} {path}: a page needs {' and '.join(missing)}: pip install 'shardmark[page]'")
        self.path = path
        self.written = False
        self.outcome = f"{option}: no report, as nothing was measured"
        """The last line of the run: where the report is, or why there is none."""
        self._most = COMMENT if option == "--report" else None
        """Most characters of Markdown: with --report it is for a comment; `python -m shardmark.report` has no limit."""
        self._file = GrowingFile(path, option=option)

    def write(self, runs: Sequence[tuple[str, Entry]], compared: Sequence[Compared] | None = None) -> None:
        """Write the report of the last of these (file name, run) pairs. Markdown shows `compared`, the comparisons of
        the run that is ending; without them, those of the last run with each of the others.

        Raises RunFileError for a run of another version, and OSError where the disk is full.
        """
        if self.path.suffix == ".md":
            text = markdown(runs, self._most, compared)
        else:
            from shardmark.report.page import page, published_page  # import what draws, which takes half a second

            beside = self.path.with_name(f"{self.path.stem}-published.html")
            published = published_page(runs[-1], self.path.name)
            text = page(runs, beside.name if published else None)
            if published:
                beside.write_text(published, encoding="utf-8")
        self._file.replace(text)
        self.written, self.outcome = True, str(self.path)

    def write_run(
        self, output: Entry, older: Sequence[tuple[str, Entry]] = (), compared: Sequence[Compared] = ()
    ) -> bool:
        """Write the report of the run that is ending; return whether it is written. An error goes to `outcome`.

        `output` is what pytest-benchmark would write; `older` are the runs it was compared with, and `compared` the
        results.
        """
        try:
            self.write([*older, ("this run", json.loads(dumped(output)))], compared)
        except Exception as error:
            self.outcome = f"--report {self.path}: {type(error).__name__}: {error}"
        return self.written

    def close(self) -> None:
        """Close the file; what is written stays."""
        self._file.close()

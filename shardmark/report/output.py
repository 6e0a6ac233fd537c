"""The file of a report: known to be writable before anything is measured, and written in one go."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from shardmark.report.markdown import COMMENT, markdown
from shardmark.rows.atomic_json import Entry, GrowingFile, dumped

NEEDED = ("altair", "jinja2", "vl_convert")
"""Modules that draw a page."""


class ReportError(ValueError):
    """A report that cannot be made, in one line."""


class Report:
    """A page (`.html`) or Markdown (`.md`), at that path.

    Raises ReportError or RowFileError where the path says neither, cannot be written, or what draws it is not there.
    """

    def __init__(self, path: Path, option: str = "--report") -> None:
        if path.suffix not in (".html", ".md"):
            raise ReportError(f"{option} {path}: a report is a page, .html, or Markdown, .md")
        if path.suffix == ".html" and (missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]):
            raise ReportError(f"{option} {path}: pip install 'shardmark[page]', as {' and '.join(missing)} draw it")
        self.path = path
        self.written = False
        self.outcome = f"{option}: no report, as nothing was measured"
        """The line that the run ends with: where the report is, or why there is none."""
        self._most = COMMENT if option == "--report" else None
        """Characters of Markdown: a run's is for a pull request, one of saved runs may be a document."""
        self._file = GrowingFile(path, option=option)

    def write(self, runs: Sequence[tuple[str, Entry]]) -> None:
        """Of the last of these runs, by the names of their files. Raises RunFileError for another version's, and
        OSError where the disk has no room."""
        if self.path.suffix == ".md":
            text = markdown(runs, self._most)
        else:
            from shardmark.report.page import page  # what draws takes a second to import

            text = page(runs)
        self._file.replace(text)
        self.written, self.outcome = True, str(self.path)

    def write_run(self, output: Entry, older: Sequence[tuple[str, Entry]] = ()) -> bool:
        """Of the run that is at its end, which a report that fails does not keep from its end; whether it is written.

        `output` is what pytest-benchmark would write of it; `older` what it was compared with.
        """
        try:
            self.write([*older, ("this run", json.loads(dumped(output)))])
        except Exception as error:
            self.outcome = f"--report {self.path}: {type(error).__name__}: {error}"
        return self.written

    def close(self) -> None:
        """Leave what is there."""
        self._file.close()

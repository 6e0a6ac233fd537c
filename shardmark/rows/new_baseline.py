"""The file that `--update-baseline` writes: this run's rows, and those of tests that were not run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmark.rows.atomic_json import Entry, GrowingFile, dumped
from shardmark.rows.change import number_of_rows
from shardmark.rows.earlier import EarlierRun
from shardmark.rows.reader import LISTS
from shardmark.rows.row import Pairs
from shardmark.rows.writer import RowFile


class NewBaseline:
    """The open file, which stays as it was unless every test has run. Raises RowFileError, in one line, if it cannot be
    written."""

    def __init__(self, path: Path, rows: RowFile) -> None:
        self._rows = rows
        self._file: GrowingFile | None = GrowingFile(path, option="--update-baseline")
        self.exists = self._file.path.exists()
        self.complete = False
        """Whether every collected test has run."""
        self.pairs: dict[str, dict[str, Pairs]] = {}
        """The paired steps of rows that were timed again, by their tests' full names."""
        self.written = False
        self.outcome = "is as it was"
        """The last line, which says whether the file was replaced."""

    def close(self) -> None:
        """Close the file unchanged."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, earlier: Sequence[EarlierRun]) -> bool:
        """Replace the file; False where that fails."""
        if self._file is None:
            return True
        fails = False
        if not self.complete:
            self.outcome = "is as it was: the run ended before its last test"
        elif not any(entry["stats"] is not None for entry in self._rows.rows):
            self.outcome = "is as it was: nothing was measured"
        else:
            try:
                output = self._rows.output()
                new = len(output["benchmarks"])
                for entry in output["benchmarks"]:
                    if entry["fullname"] in self.pairs:
                        entry["extra_info"]["time"]["pairs"] = self.pairs[entry["fullname"]]
                for run in earlier:
                    _keep_rows_of_other_tests(output, run)
                self._file.replace(dumped(output, indent=4))
                self.written = True
                kept = len(output["benchmarks"]) - new
                self.outcome = f"has {number_of_rows(new)} of this run, and {kept} of tests that were not run"
            except Exception as error:
                self.outcome = f"is as it was: {type(error).__name__}: {error}"
                fails = True
        self.close()
        return not fails


def _keep_rows_of_other_tests(output: Entry, earlier: EarlierRun) -> None:
    """Put the file's other rows, and their questions, first, if they are of this machine."""
    if earlier.other_machine is not None:
        return
    fresh = {entry["fullname"] for each in LISTS for entry in output[each]}
    for each in LISTS:
        kept = [entry for name, entry in earlier.baseline.entries[each].items() if name not in fresh]
        output[each] = [*kept, *output[each]]
    asked = {question["text"]: question for question in output["questions"]}
    output["questions"] = [*(earlier.baseline.questions | asked).values()]

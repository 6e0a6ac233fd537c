"""`--against old.json`: a row that got slower or larger than in that file fails; the last lines name each change.

Several files, or a folder of them, are all compared with: ten changes of 0.9% are one of 9% since the oldest. With
`--update-baseline` no row fails: the rows of this run replace those in the file.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.change_in_time import share
from shardmark.rows.comparison import Compared
from shardmark.rows.earlier import EarlierRun
from shardmark.rows.new_baseline import NewBaseline
from shardmark.rows.pairs import pairs_entry
from shardmark.rows.reader import RunFileError
from shardmark.rows.row import Row
from shardmark.rows.writer import RowFile
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.slowdown import LARGEST, Gate, Paired, slowdown

WIDEST = 0.1
"""Rows of a new baseline are named where a larger slowdown could not be told from noise."""


class Against:
    """The pytest plugin of `--against`.

    Raises RunFileError, RowFileError or another ValueError, in one line, if a file cannot be used.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        update: bool,
        rows: RowFile,
        largest: float = LARGEST,
        accepted: Accepted | None = None,
    ) -> None:
        if update and len(paths) > 1:
            raise ValueError("--update-baseline replaces one file: give --against once")
        for path in paths:
            if rows.path is not None and _is_same(path, rows.path):
                raise ValueError(
                    f"--against {path} is the file of --benchmark-json too: it is --update-baseline that replaces it"
                )
        self.rows = rows
        self.largest = largest
        self.name = printable(paths[-1].name)
        self.new = NewBaseline(paths[0], rows) if update else None
        """Opened before anything is measured, so that a file that cannot be written ends the run at once."""
        try:
            opened = [] if self.new is not None and not self.new.exists else paths
            runs = [run for path in opened for run in _runs(path, rows, largest, accepted)]
        except BaseException:
            self.close()
            raise
        self.runs = sorted(runs, key=lambda run: str(run.output.get("datetime", "")))
        """The earlier runs, oldest first."""
        self._wide: dict[str, float] = {}
        self._collected: set[str] = set()

    def close(self) -> None:
        """Close the file unchanged."""
        if self.new is not None:
            self.new.close()

    def gate(self, test_id: str, peer: str | None) -> Gate | None:
        """The comparisons in time that the test's rounds must decide; None if there are none."""
        before = tuple(pair for run in self.runs for pair in run.pairs(test_id, peer).items() if pair[1].processes)
        return Gate(before, self.largest) if before else None

    def tensors(self, test_id: str) -> int | None:
        """Bytes of tensors at the peak in the test's latest row, if it has one."""
        rows = [row for run in self.runs if (row := run.row(test_id)) is not None]
        return rows[-1].memory.get("tensors") if rows else None

    def collected(self, test_ids: Iterable[str]) -> None:
        """Note the tests that measure."""
        self._collected = set(test_ids)

    def compares_time(self, test_id: str) -> bool:
        """Whether the test's times may be compared with those of an earlier row."""
        old = [row for run in self.runs if run.other_machine is None and (row := run.row(test_id)) is not None]
        return any(row.pairs for row in old)

    def judge(self, test_id: str, row: Row) -> list[tuple[str, str]]:
        """Compare a row with its earlier ones: (verdict, text) of each figure; none with `--update-baseline`."""
        found = []
        for i, run in enumerate(self.runs):
            found += run.judge(test_id, row, self.runs[i + 1 :])
        return found if self.new is None else []

    def set_pairs(self, test_id: str, pairs: Mapping[str, Paired]) -> None:
        """Replace the pairs of a row of the new baseline; note if they are wide."""
        assert self.new is not None
        self.new.pairs[test_id] = {name: pairs_entry(each) for name, each in pairs.items()}
        widest = max((slowdown(each, each).uncertainty for each in pairs.values()), default=0.0)
        if widest > WIDEST:
            self._wide[test_id] = widest

    def compared(self) -> list[Compared]:
        """The comparisons, for the report, that with the latest run first."""
        return [run.compared(self._collected) for run in reversed(self.runs)]

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        if not self.runs:
            return [f"against: {self.name}, which this run is to write"]
        return [line for run in self.runs for line in run.header(config.get_terminal_writer())]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Note that the run is complete: an interrupted one, or one that `-x` ends, raises here."""
        result = yield
        if self.new is not None:
            self.new.complete = True
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the new baseline; if that fails, the run fails."""
        if self.new is not None and not self.new.write(self.runs):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Report the comparisons below everything else, that with the latest run last."""
        yield
        for run in self.runs:
            run.write(terminalreporter, self._collected, brief=run is not self.runs[-1])
        if self.new is not None:
            if not self.runs:
                terminalreporter.section(f"against {self.name}", sep="-")
            for test_id, width in self._wide.items():
                line = f"  {test_id}: slowdowns up to {share(width)} cannot be found beside this row"
                terminalreporter.write_line(printable(line), yellow=True)
            terminalreporter.write_line(printable(f"{self.name} {self.new.outcome}"), yellow=not self.new.written)


def _runs(path: Path, rows: RowFile, largest: float, accepted: Accepted | None) -> list[EarlierRun]:
    """The run of a file, or those of a folder. RunFileError, in one line, for a folder without runs."""
    if not _is_folder(path):
        return [EarlierRun(path, rows, largest, accepted)]
    files = sorted(path.glob("*.json"))
    if not files:
        raise RunFileError(f"--against {path}: there are no .json files in it")
    try:
        return [EarlierRun(file, rows, largest, accepted) for file in files]
    except RunFileError as error:
        raise RunFileError(f"--against {path}: {str(error).removeprefix('--against ')}") from None


def _is_folder(path: Path) -> bool:
    with suppress(OSError, ValueError):  # too long a name, or a null byte: opening it says so
        return path.is_dir()
    return False


def _is_same(path: Path, other: Path) -> bool:
    with suppress(ValueError):  # a null byte in a path
        return os.path.realpath(path) == os.path.realpath(other)
    return False

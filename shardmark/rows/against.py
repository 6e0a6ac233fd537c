"""`--against old.json`: a row that got slower or larger than in that file fails; the last lines name each change.

With `--update-baseline` no row fails: the rows of this run replace those in the file.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.atomic_json import Entry, GrowingFile, dumped
from shardmark.rows.baseline import Baseline, BaselineRow, Machine
from shardmark.rows.change import number_of_rows
from shardmark.rows.comparison import Compared, Comparison, compare
from shardmark.rows.reader import LISTS
from shardmark.rows.row import Row
from shardmark.rows.writer import RowFile
from shardmark.text import printable
from shardmark.verdict.accept import Accepted
from shardmark.verdict.betting import Interval


class Against:
    """The pytest plugin of `--against`.

    Raises RunFileError, RowFileError or another ValueError, in one line, if the file cannot be used.
    """

    def __init__(self, path: Path, update: bool, rows: RowFile, accepted: Accepted | None = None) -> None:
        self.path = path
        self.name = printable(path.name)
        self.rows = rows
        self.update = update
        if rows.path is not None and _is_same(path, rows.path):
            raise ValueError(
                f"--against {path} is the file of --benchmark-json too: it is --update-baseline that replaces it"
            )
        self._file = GrowingFile(path, option="--update-baseline") if update else None
        """Opened before anything is measured, so that a file that cannot be written ends the run at once."""
        try:
            self.baseline = None if self._file is not None and not self._file.path.exists() else Baseline(path)
        except BaseException:
            self.close()
            raise
        self._comparison = Comparison(accepted)
        self._collected: set[str] = set()
        self._complete = False
        """Whether every collected test has run."""
        self._updated: str | None = None
        """With `--update-baseline`: the last line, which says whether the file was replaced."""
        self._written = False

    def close(self) -> None:
        """Close the file unchanged."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @cached_property
    def other_machine(self) -> str | None:
        """One line that says why times are not compared; None on the baseline's own machine."""
        if self.baseline is None or self.baseline.machine == (here := Machine.of(self.rows.machine_info)):
            return None
        return printable(f"time is not compared: {self.name} is of {self.baseline.machine}; this is {here}")

    def limits(self, test_id: str, peer: str) -> tuple[float, ...]:
        """The largest ratio to that peer that the baseline allows; empty if there is nothing to compare with."""
        old = self._row(test_id) if self.other_machine is None else None
        if old is None or old.ratio is None or old.ratio.ends is None or old.peer != peer:
            return ()
        return (old.ratio.high,)

    def tensors(self, test_id: str) -> int | None:
        """Bytes of tensors at the peak in the test's baseline row, if it has one."""
        old = self._row(test_id)
        return None if old is None else old.memory.get("tensors")

    def collected(self, test_ids: Iterable[str]) -> None:
        """Note the tests that measure."""
        self._collected = set(test_ids)

    def compares_time(self, test_id: str) -> bool:
        """Whether the test's ratio to its peer may be compared with its baseline row's."""
        old = self._row(test_id)
        return self.other_machine is None and old is not None and old.ratio is not None

    def judge(self, test_id: str, row: Row, ratio: Interval | None) -> list[tuple[str, str]]:
        """Compare a row with its baseline: (verdict, text) of each figure; none with `--update-baseline`."""
        old = self._row(test_id)
        if old is None:
            return []
        verdicts = self._comparison.add(test_id, compare(old, row, ratio, self.other_machine is None, self.name))
        return [] if self.update else verdicts

    def compared(self) -> Compared | None:
        """The comparison, for the report; None without a baseline."""
        if self.baseline is None:
            return None
        machine = () if self.other_machine is None else (self.other_machine,)
        return self._comparison.compared(self.name, *machine, *self._other_rows(self.baseline))

    def _row(self, test_id: str) -> BaselineRow | None:
        return None if self.baseline is None else self.baseline.rows.get(test_id)

    def pytest_report_header(self, config: pytest.Config) -> str:
        if self.baseline is None:
            return f"against: {self.name}, which this run is to write"
        if self.other_machine is not None:
            return config.get_terminal_writer().markup(self.other_machine, red=True, bold=True)
        return f"against: {self.name}, {number_of_rows(len(self.baseline.rows))} of this machine"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Note that the run is complete: an interrupted one, or one that `-x` ends, raises here."""
        result = yield
        self._complete = True
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the new baseline; if that fails, the run fails."""
        if self._file is None:
            return
        if not self._complete:
            self._updated = "is as it was: the run ended before its last test"
        elif not any(entry["stats"] is not None for entry in self.rows.rows):
            self._updated = "is as it was: nothing was measured"
        else:
            try:
                output = self.rows.output()
                new = len(output["benchmarks"])
                self._keep_rows_of_other_tests(output)
                self._file.replace(dumped(output, indent=4))
                self._written = True
                kept = len(output["benchmarks"]) - new
                self._updated = f"has {number_of_rows(new)} of this run, and {kept} of tests that were not run"
            except Exception as error:
                self._updated = f"is as it was: {type(error).__name__}: {error}"
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        self.close()

    def _keep_rows_of_other_tests(self, output: Entry) -> None:
        """Put the baseline's other rows, and their questions, first, if they are of this machine."""
        if self.baseline is None or self.other_machine is not None:
            return
        fresh = {entry["fullname"] for each in LISTS for entry in output[each]}
        for each in LISTS:
            kept = [entry for name, entry in self.baseline.entries[each].items() if name not in fresh]
            output[each] = [*kept, *output[each]]
        asked = {question["text"]: question for question in output["questions"]}
        output["questions"] = [*(self.baseline.questions | asked).values()]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Report the comparison below everything else."""
        yield
        if self.baseline is not None or self._updated is not None:
            terminalreporter.section(f"against {self.name}", sep="-")
        if self.other_machine is not None:
            terminalreporter.write_line(self.other_machine, red=True, bold=True)
        if self.baseline is not None:
            self._comparison.write(terminalreporter, self._other_rows(self.baseline))
        if self._updated is not None:
            terminalreporter.write_line(printable(f"{self.name} {self._updated}"), yellow=not self._written)

    def _other_rows(self, baseline: Baseline) -> Iterator[str]:
        """A line that counts the rows that only this run or only the baseline has."""
        measured = {entry["fullname"] for entry in self.rows.rows if entry["stats"] is not None}
        missing = baseline.rows.keys() - measured
        others = {
            "new": len(measured - baseline.rows.keys()),
            f"of {self.name} not measured this time": len(missing & self._collected),
            f"of {self.name} not among this run's tests": len(missing - self._collected),
        }
        if any(others.values()):
            yield "other rows: " + ", ".join(f"{count} {which}" for which, count in others.items() if count)


def _is_same(path: Path, other: Path) -> bool:
    with suppress(ValueError):  # a null byte in a path
        return os.path.realpath(path) == os.path.realpath(other)
    return False

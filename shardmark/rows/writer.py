"""The file of `--benchmark-json`: each row is on disk as soon as it is measured, whatever then ends the run.

The file is whole JSON at any time, and a row costs its own size to write, not the file's. At the end it is written once
more, as pytest-benchmark writes it.

Rows without times (not started, out of memory) are in the JSON's own list "unmeasured", as pytest-benchmark's tools
expect times in "benchmarks".
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shardmark.ranks.signals import Ending
from shardmark.rows.atomic_json import Entry, GrowingFile, dumped


class RowFile:
    """The rows of this run, and their file, if there is one. `said(rows)` returns the entries of
    the whole file beside its rows.

    Raises RowFileError where the path is no regular file, cannot be written, or is being written by another run.
    """

    def __init__(
        self, config: pytest.Config, ending: Ending, said: Callable[[list[Entry]], Entry], writes: bool = True
    ) -> None:
        self.config = config
        self._ending = ending
        self._said = said
        option: str | None = config.getoption("benchmark_json", None)
        self.path: Path | None = None if option is None else Path(option)
        self.rows: list[Entry] = []
        """Every row of this run, as its test made it: an entry with name, group, stats and extra_info."""
        self.unmeasured: list[Entry] = []
        """The rows without times."""
        self._again: str | None = None
        """The present test, where it has a row from an earlier attempt."""
        self.names: set[str] = set()
        """Full names of the tests that have a row."""
        self.trouble: str | None = None
        """The last error that kept rows from the file, in one line."""
        self.not_saved: str | None = None
        """Why `--benchmark-save` failed."""
        self._file: GrowingFile | None = None
        self._rescued: GrowingFile | None = None
        """A file in another folder with all rows, made once they could not be written to their own file."""
        if self.path is not None and writes:
            self._file = GrowingFile(self.path)

    def begin(self, test: str) -> None:
        """The test of that full name starts: a row that it has from an earlier attempt gives way to its next one."""
        self._again = test if test in self.names else None

    def add(self, entry: Entry) -> None:
        """Save a row. A row with `stats` is in pytest-benchmark's own list already."""
        if entry["fullname"] == self._again:
            self._drop(entry["fullname"], timed=entry["stats"] is not None)
        self.rows.append(entry)
        self.names.add(entry["fullname"])
        if entry["stats"] is None:
            self.unmeasured.append(entry)
        if self._file is not None:
            with self._ending.held():
                self._attempt(self._append, self._file)
                if not self._file.is_whole(len(self.rows)):
                    self._rescue()

    def _drop(self, test: str, timed: bool) -> None:
        """Forget the test's rows; where its next one is `timed`, pytest-benchmark's last entry is that row's."""
        self._again = None
        for rows in (self.rows, self.unmeasured):
            rows[:] = [entry for entry in rows if entry["fullname"] != test]
        benchmarks = self._benchmarks.benchmarks
        new = [benchmarks.pop()] if timed else []
        benchmarks[:] = [each for each in benchmarks if each.fullname != test] + new
        for file in (self._file, self._rescued):
            if file is not None:
                file.forget_rows()

    @property
    def lost(self) -> list[str]:
        """A line for each file that lacks rows, with the reason."""
        troubles = ("json", self.trouble), ("save", self.not_saved)
        return [f"--benchmark-{option}: {trouble}" for option, trouble in troubles if trouble is not None]

    def backends(self, family: str) -> list[str]:
        """Names of the backends that ran this family's workloads."""
        rows = [entry["extra_info"] for entry in self.rows]
        return sorted({row["backend"] for row in rows if row["family"] == family and row["backend"]})

    def output(self) -> Entry:
        """All that was measured, as pytest-benchmark writes it."""
        return {**self._output(self._benchmarks.benchmarks), **self._said(self.rows)}

    def finish(self) -> None:
        """Write the whole file once more, elsewhere if that fails; then do what `--benchmark-save` asks for."""
        with self._ending.held():
            if self._file is not None:
                self._finish(self._file)
            self._file = None
            if self._benchmarks is not None and (self._benchmarks.save or self._benchmarks.autosave):
                try:
                    self._benchmarks.handle_saving()
                except Exception as error:
                    self.not_saved = f"{type(error).__name__}: {error}"
                self._benchmarks.save = self._benchmarks.autosave = None

    def _finish(self, file: GrowingFile) -> None:
        ran = self._benchmarks is not None  # else the options alone were checked
        if ran and (self.rows or self._benchmarks.benchmarks):
            self.trouble = None  # only how it ends matters
            self._attempt(self._append, file)
            self._attempt(self._write_whole, file)
            if self.trouble is not None and file.is_whole(len(self.rows)):
                self.trouble = None  # it has every row
            elif self.trouble is not None:
                self._say_where_they_are(file)
            elif self._rescued is not None:
                self._rescued.remove()
            self._benchmarks.json = None  # pytest-benchmark would write in place, and lose all that it cannot finish
        for each in (file, self._rescued):
            if each is not None:
                each.close()

    def _attempt(self, write: Any, *args: Any) -> None:
        """Write. An error becomes `trouble`, a line of the summary, and tests go on."""
        try:
            write(*args)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def _append(self, file: GrowingFile) -> None:
        """Write the rows that this file lacks; after a failure these are several."""
        timed, untimed = file.taken
        new, unmeasured = self._benchmarks.benchmarks[timed:], self.unmeasured[untimed:]
        output = self._output(new)
        benchmarks = [dumped(entry) for entry in output.pop("benchmarks")]
        output.pop("unmeasured", None)
        file.append(output, benchmarks, [dumped(entry) for entry in unmeasured], count=len(self.rows))
        file.taken = timed + len(new), untimed + len(unmeasured)

    def _write_whole(self, file: GrowingFile) -> None:
        file.replace(dumped(self.output(), indent=4))

    def _rescue(self) -> bool:
        """Write all rows to a file in any folder that takes one; return whether one did."""
        if self._rescued is not None:
            with suppress(Exception):
                self._append(self._rescued)
                return True
        for folder in _folders_for_anything():
            with suppress(Exception):  # full as well, or gone
                other = GrowingFile(folder / f"shardmark-rows-{secrets.token_hex(4)}.json", mode=0o600)
                try:
                    self._append(other)
                except BaseException:
                    other.close()
                    raise
                if self._rescued is not None:
                    self._rescued.remove()
                    self._rescued.close()
                self._rescued = other
                return True
        return False

    def _say_where_they_are(self, file: GrowingFile) -> None:
        """Rescue the rows; set `path` and `trouble` to the file that has them, or the most of them."""
        if not self._rescue() or self._rescued is None:
            most = max((each for each in (file, self._rescued) if each is not None), key=lambda each: each.rows)
            where = f"only {most.rows} of {len(self.rows)} rows are in {most.shown}"
            self.trouble, self.path = f"{self.trouble}; {where}", None
            return
        with suppress(Exception):  # the rescued file is whole without this, too
            self._write_whole(self._rescued)
        self.path = self._rescued.path
        self.trouble = f"{self.trouble}; all rows are in {self.path}"

    def _output(self, benchmarks: list[Any]) -> Entry:
        """The JSON that pytest-benchmark would write of these."""
        hook = self.config.hook
        output = hook.pytest_benchmark_generate_json(
            config=self.config,
            benchmarks=benchmarks,
            include_data=True,
            machine_info=self.machine_info,
            commit_info=self._commit_info,
        )
        hook.pytest_benchmark_update_json(config=self.config, benchmarks=benchmarks, output_json=output)
        return output

    @property
    def _benchmarks(self) -> Any:
        """pytest-benchmark's own session, which holds its timed benchmarks."""
        return self.config.pluginmanager.get_plugin("pytest-benchmark")

    @cached_property
    def machine_info(self) -> Entry:
        """The machine, as pytest-benchmark and this plugin describe it."""
        return self._benchmarks.get_machine_info()

    @cached_property
    def _commit_info(self) -> Entry:
        return self.config.hook.pytest_benchmark_generate_commit_info(config=self.config)


def _folders_for_anything() -> Iterator[Path]:
    """Folders in which a file may be made when its own cannot be written."""
    for folder in (tempfile.gettempdir, Path.cwd, Path.home, lambda: "/var/tmp", lambda: "/dev/shm"):
        with suppress(OSError, RuntimeError):  # none for temporary files; a folder that is gone; no home
            yield Path(folder())

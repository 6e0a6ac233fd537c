"""The file of `--benchmark-json`: each row is on disk as soon as it is measured, whatever then ends the run.

Rows go to the end of the file one by one, each with the brackets that close it: so it is whole JSON at any time, and a
row costs its own size to write. At the end it is written once more, as pytest-benchmark writes it.

Rows without times (not started, out of memory) are in the JSON's own list "unmeasured", as pytest-benchmark's tools
expect times in "benchmarks".
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

Entry = dict[str, Any]


class RowFileError(ValueError):
    """A path to which rows cannot go, in one line."""


class RowFile:
    """The rows of this run, and their file, if there is one.

    Raises RowFileError where the path is no regular file, cannot be written, or belongs to a run that goes on.
    """

    def __init__(self, config: pytest.Config, writes: bool = True) -> None:
        self.config = config
        option: str | None = config.getoption("benchmark_json", None)
        self.path: Path | None = None if option is None else Path(option)
        self.rows: list[Entry] = []
        """Every row of this run, as its test made it: an entry with name, group, stats and extra_info."""
        self.unmeasured: list[Entry] = []
        """Those without times."""
        self.names: set[str] = set()
        """The full names of their tests."""
        self.trouble: str | None = None
        """What kept rows from the file, in one line, as it last happened."""
        self._file: GrowingFile | None = None
        self._written = 0
        if self.path is not None and writes:
            self._file = GrowingFile(self.path)

    def add(self, entry: Entry) -> None:
        """Take a row and save it. One with `stats` is in pytest-benchmark's own list already."""
        self.rows.append(entry)
        self.names.add(entry["fullname"])
        if entry["stats"] is None:
            self.unmeasured.append(entry)
        if self._file is not None:
            self._attempt(self._append, self._file)

    def backends(self, family: str) -> list[str]:
        """What ran underneath that family's workloads in this run, by name."""
        rows = [entry["extra_info"] for entry in self.rows]
        return sorted({row["backend"] for row in rows if row["family"] == family and row["backend"]})

    def finish(self) -> None:
        """Write the file once more, with all that pytest-benchmark has, in its place; where that fails, elsewhere."""
        if self._file is None:
            return
        ran = self._benchmarks is not None  # not where options alone are looked at
        if ran and (self.rows or self._benchmarks.benchmarks):
            self._attempt(self._append, self._file)
            self._attempt(self._write_whole, self._file)
            if self.trouble is not None and self._file.is_whole(len(self.rows)):
                self.trouble = None  # it has every row
            elif self.trouble is not None:
                self._attempt(self._rescue)
            self._benchmarks.json = None  # it would write in place, and lose all that it cannot finish
        self._file.close()
        self._file = None

    def _attempt(self, write: Any, *args: Any) -> None:
        """Whatever fails, tests go on; what failed is a line in the summary."""
        try:
            write(*args)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def _append(self, file: GrowingFile) -> None:
        """All that is not in the file yet: after a failure more than one row."""
        new = self._benchmarks.benchmarks[self._written :]
        output = self._output(new)
        rows = [json.dumps(entry) for entry in output.pop("benchmarks")]
        output.pop("unmeasured", None)
        file.append(output, rows, json.dumps(self.unmeasured), count=len(self.rows))
        self._written += len(new)

    def _write_whole(self, file: GrowingFile) -> None:
        file.replace(json.dumps(self._output(self._benchmarks.benchmarks), indent=4))
        self.trouble = None

    def _rescue(self) -> None:
        """Rows that cannot be where they should be are where anything can be."""
        with tempfile.NamedTemporaryFile("w", prefix="shardmark-rows-", suffix=".json", delete=False) as file:
            json.dump(self._output(self._benchmarks.benchmarks), file, indent=4)
        self.trouble, self.path = f"{self.trouble}; all rows are in {file.name}", Path(file.name)

    def _output(self, benchmarks: list[Any]) -> Entry:
        """What pytest-benchmark would write of these."""
        hook = self.config.hook
        output = hook.pytest_benchmark_generate_json(
            config=self.config,
            benchmarks=benchmarks,
            include_data=True,
            machine_info=self._machine_info,
            commit_info=self._commit_info,
        )
        hook.pytest_benchmark_update_json(config=self.config, benchmarks=benchmarks, output_json=output)
        return output

    @property
    def _benchmarks(self) -> Any:
        """pytest-benchmark's own session, which holds what it has timed."""
        return self.config.pluginmanager.get_plugin("pytest-benchmark")

    @cached_property
    def _machine_info(self) -> Entry:
        return self._benchmarks.get_machine_info()

    @cached_property
    def _commit_info(self) -> Entry:
        return self.config.hook.pytest_benchmark_generate_commit_info(config=self.config)


class GrowingFile:
    """JSON to which rows are added. It takes the path's name with its first row; until then an older file stays.

    A lock on it tells a second run that this one goes on.
    """

    def __init__(self, path: Path) -> None:
        self.shown = path
        self._has_benchmarks = False
        self.path = Path(os.path.realpath(path))  # a link stays one
        self.begun = self.path.with_name(f".{self.path.name}.partial")
        self.rows = 0
        self._end = 0
        """Where the closing brackets begin."""
        self._closing = b""
        try:
            if self.path.exists():
                self._check(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), keep=False)
            self._descriptor = os.open(self.begun, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if not self.path.parent.is_dir():
                raise RowFileError(f"--benchmark-json {path}: there is no folder {path.parent}") from None
            raise RowFileError(f"--benchmark-json {path}: {error.strerror}") from None
        self._check(self._descriptor, keep=True)
        os.ftruncate(self._descriptor, 0)

    def append(self, head: Entry, rows: list[str], unmeasured: str, count: int) -> None:
        """Add those rows; OSError, with the file as it was, where there is no room."""
        closing = f'\n], "unmeasured": {unmeasured}}}\n'.encode()
        comma = "," if self._has_benchmarks else ""
        text = f"{comma}\n" + ",\n".join(rows) if rows else ""
        if not self._closing:  # the first of all
            text = json.dumps({**head, "benchmarks": []})[:-2] + text
        self._put(text.encode(), closing)
        self._has_benchmarks = self._has_benchmarks or bool(rows)
        if not self.rows:
            os.replace(self.begun, self.path)
        self.rows = count

    def _put(self, text: bytes, closing: bytes) -> None:
        data = text + closing
        try:
            if os.pwrite(self._descriptor, data, self._end) < len(data):
                raise OSError(28, os.strerror(28))  # no space left on device
        except OSError:
            os.pwrite(self._descriptor, self._closing, self._end)  # this room it had
            os.ftruncate(self._descriptor, self._end + len(self._closing))
            raise
        os.ftruncate(self._descriptor, self._end + len(data))
        self._end += len(text)
        self._closing = closing

    def replace(self, text: str) -> None:
        """The whole file, as one: a reader finds the old one or the new one."""
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            new.write_text(text)
            with suppress(OSError):
                new.chmod(stat.S_IMODE(self.path.stat().st_mode))
            os.replace(new, self.path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def is_whole(self, rows: int) -> bool:
        """Whether the file under that name is this one, with so many rows."""
        with suppress(OSError):
            return self.rows == rows and os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        return False

    def close(self) -> None:
        """Without a row there is no file, and an older one stays."""
        with suppress(OSError):
            if not self.rows and os.path.samestat(os.fstat(self._descriptor), self.begun.stat()):
                self.begun.unlink()
        os.close(self._descriptor)

    def _check(self, descriptor: int, keep: bool) -> None:
        """RowFileError where it is no regular file, or another run has it."""
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RowFileError(f"--benchmark-json {self.shown}: not a regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            keep = False
            raise RowFileError(f"--benchmark-json {self.shown}: another run is writing it") from None
        except RowFileError:
            keep = False
            raise
        except OSError:
            pass  # a file system without locks
        finally:
            if not keep:
                os.close(descriptor)

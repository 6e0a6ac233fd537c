"""A JSON file that grows row by row and is whole at any time."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class RowFileError(ValueError):
    """Rows cannot be written to this path; the message is one line."""


_MIDDLE = b'\n], "benchmarks": ['
_CLOSING = b"\n]}\n"


class GrowingFile:
    """JSON with two growing lists, in two copies.

        {head, "unmeasured": [..., and spaces for more], "benchmarks": [...]}

    A row is added to the copy with the hidden name, which then takes the path's name. So the path holds whole JSON even
    if a write is cut short or the power goes, and a row costs its own size to write: to write the whole file for each
    of 2,000 rows takes 40 times as long.

    An older file stays until the first row. Locks on both copies make a second run on the path an error.
    """

    def __init__(self, path: Path, mode: int | None = None, option: str = "--benchmark-json") -> None:
        self.shown = path
        self._option = option
        self.rows = 0
        self.taken = (0, 0)
        """Numbers of benchmarks and of unmeasured rows that the caller has appended; the caller sets it."""
        self._opening = b""
        self._unmeasured, self._benchmarks = bytearray(), bytearray()
        self._named: _Copy | None = None
        self._spare: _Copy | None = None
        self._mode = mode
        try:
            self.path = Path(os.path.realpath(path))  # a link stays one
            self.hidden = self.path.with_name(f".{self.path.name}.partial")
            self._aside = self.path.with_name(f".{self.path.name}.aside")
            if self.path.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if self.path.exists():
                older = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    self._check(older)
                    self._mode = stat.S_IMODE(os.fstat(older).st_mode)
                finally:
                    os.close(older)
            self._spare = self._new_copy()
        except RowFileError:
            raise
        except FileNotFoundError as error:
            folder = (self.path if path.is_symlink() else path).parent
            why = error.strerror if folder.is_dir() else f"there is no folder {folder}"
            raise RowFileError(f"{option} {path}: {why}") from None
        except (OSError, ValueError) as error:
            raise RowFileError(f"{option} {path}: {getattr(error, 'strerror', error)}") from None

    def append(self, head: Entry, benchmarks: list[str], unmeasured: list[str], count: int) -> None:
        """Add these rows, `count` in all. Raises OSError where that fails; the file then has the rows before."""
        if self._named is None:
            self._opening = dumped(head)[:-1].encode() + (b', "unmeasured": [' if head else b'"unmeasured": [')
        untimed, timed = len(self._unmeasured), len(self._benchmarks)
        self._unmeasured += _joined(unmeasured, after=untimed)
        self._benchmarks += _joined(benchmarks, after=timed)
        try:
            spare = self._usable_spare()
            spare.write(self._opening, self._unmeasured, self._benchmarks)
            self._exchange(spare)
        except BaseException:
            del self._unmeasured[untimed:], self._benchmarks[timed:]
            if self._spare is not None:
                self._spare.opening = 0  # it may have more than the named copy
            raise
        self.rows = count

    def forget_rows(self) -> None:
        """Have the next `append` write the file anew, with the rows that it gets and no others."""
        self.taken = (0, 0)
        self._unmeasured.clear()
        self._benchmarks.clear()
        for copy in (self._spare, self._named):
            if copy is not None:
                copy.opening = 0

    def replace(self, text: str) -> None:
        """Replace the whole file by this text; no row can be added afterwards."""
        spare = self._usable_spare()
        spare.write_all(text.encode())
        self._take_name()
        self._spare = None
        os.close(spare.descriptor)

    def is_whole(self, rows: int) -> bool:
        """Whether the path has this file, with that many rows."""
        return self.rows == rows and self._named is not None and self._named.is_at(self.path)

    def remove(self) -> None:
        """Remove the file from its path."""
        with suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Remove the spare copy. Without a row no file is made, and an older one stays."""
        with suppress(OSError):
            self._aside.unlink(missing_ok=True)
        for copy in (self._spare, self._named):
            if copy is not None:
                self._remove(copy)
        self._spare = self._named = None

    def _remove(self, copy: _Copy) -> None:
        """Close a copy; remove the hidden name if it is this copy's."""
        with suppress(OSError):
            if copy.is_at(self.hidden):
                self.hidden.unlink()
        os.close(copy.descriptor)

    def _exchange(self, spare: _Copy) -> None:
        """Give the spare copy the path's name. Where the file system has links, the named copy becomes the spare."""
        before = self._named
        with suppress(OSError):
            self._aside.unlink(missing_ok=True)
            if before is not None and before.is_at(self.path):  # not moved away, or replaced by another program
                os.link(self.path, self._aside)
        self._take_name()
        self._named, self._spare = spare, None
        if before is not None:
            with suppress(OSError):
                if before.is_at(self._aside):
                    os.replace(self._aside, self.hidden)
                    self._spare = before
            if self._spare is None:
                os.close(before.descriptor)

    def _take_name(self) -> None:
        """Give the hidden file the path's name, on disk too."""
        os.replace(self.hidden, self.path)
        with suppress(OSError):  # a folder that cannot be read
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _to_disk(folder)
            finally:
                os.close(folder)

    def _usable_spare(self) -> _Copy:
        """The spare copy; a new one if there is none or somebody removed it."""
        if self._spare is not None and not self._spare.is_at(self.hidden):
            os.close(self._spare.descriptor)
            self._spare = None
        if self._spare is None:
            self._spare = self._new_copy()
        return self._spare

    def _new_copy(self) -> _Copy:
        """An empty file under the hidden name, locked."""
        while True:
            descriptor = os.open(self.hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            copy = _Copy(descriptor)
            try:
                self._check(descriptor)
                if copy.is_at(self.hidden):  # else another run ended and removed it before it was locked
                    os.ftruncate(descriptor, 0)
                    if self._mode is not None:
                        os.fchmod(descriptor, self._mode)
                    return copy
            except RowFileError:
                os.close(descriptor)
                raise
            except BaseException:
                self._remove(copy)
                raise
            os.close(descriptor)

    def _check(self, descriptor: int) -> None:
        """Lock a file. Raises RowFileError if it is no regular file or another run has it."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RowFileError(f"{self._option} {self.shown}: not a regular file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RowFileError(f"{self._option} {self.shown}: another run is writing it") from None
        except OSError:
            pass  # a file system without locks


@dataclass
class _Copy:
    """One of the two files: the bytes before its lists, and the lengths of its lists in bytes. While `opening` is 0,
    none of its content counts."""

    descriptor: int
    opening: int = 0
    room: int = 0
    """Bytes of the list "unmeasured", with the spaces behind it."""
    unmeasured: int = 0
    benchmarks: int = 0

    def write(self, opening: bytes, unmeasured: bytearray, benchmarks: bytearray) -> None:
        """Write the rows that this copy lacks; write everything where the unmeasured rows have outgrown their room."""
        if not self.opening or len(unmeasured) > self.room:
            room = 2 * len(unmeasured)
            self._put(opening + unmeasured.ljust(room) + _MIDDLE + benchmarks + _CLOSING, 0)
            self.opening, self.room = len(opening), room
            start = self.opening + room + len(_MIDDLE)
        else:
            start = self.opening + self.room + len(_MIDDLE)
            self._put(unmeasured[self.unmeasured :], self.opening + self.unmeasured)
            self._put(benchmarks[self.benchmarks :] + _CLOSING, start + self.benchmarks)
        self.unmeasured, self.benchmarks = len(unmeasured), len(benchmarks)
        os.ftruncate(self.descriptor, start + self.benchmarks + len(_CLOSING))
        _to_disk(self.descriptor)

    def write_all(self, data: bytes) -> None:
        """Replace the content."""
        self.opening = 0
        self._put(data, 0)
        os.ftruncate(self.descriptor, len(data))
        _to_disk(self.descriptor)

    def is_at(self, path: Path) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.descriptor), path.stat())
        return False

    def _put(self, data: bytes | bytearray, position: int) -> None:
        """Write all of the data at that position. Raises OSError where the disk has no room."""
        left = memoryview(data)
        while left:
            written = os.pwrite(self.descriptor, left, position)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            position, left = position + written, left[written:]


def _to_disk(descriptor: int) -> None:
    """Wait until the file, or the folder, would survive a power cut: 1 ms on an SSD, some 20 ms on a turning disk."""
    with suppress(OSError):  # a file system that cannot tell
        os.fsync(descriptor)


def _joined(rows: list[str], after: int) -> bytes:
    """Rows as elements of a list that has `after` bytes already."""
    text = ("," if after else "") + "\n" + ",\n".join(rows)
    return text.encode() if rows else b""


def dumped(value: Any, indent: int | None = None) -> str:
    """JSON of any value: other types become text, NaN and infinities null."""
    try:
        return json.dumps(value, default=str, allow_nan=False, indent=indent)
    except Exception:  # NaN, a circle, or a value whose text cannot be made
        return json.dumps(_plain(value, ()), indent=indent)


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """A copy that JSON can hold; `inside` are the ids of the containers that the value is in."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if id(value) in inside or not isinstance(value, dict | list | tuple):
        try:
            return str(value)
        except Exception as error:
            return f"{type(value).__name__} ({type(error).__name__})"
    inside = (*inside, id(value))
    if isinstance(value, dict):
        return {str(key): _plain(each, inside) for key, each in value.items()}
    return [_plain(each, inside) for each in value]

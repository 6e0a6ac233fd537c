"""Ranks' stderr: files in the world's folder, which the test's process copies to its own stderr after each call.

C++ writes the reason for which it aborts a process to stderr alone, as Gloo does where messages do not match. So the
error of a rank that was aborted can have it.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

_REASON = re.compile(r"^ *what\(\): *(.+)$", re.MULTILINE)
"""The line in which C++ names an exception that nobody caught."""


def redirect(folder: Path, rank: int) -> None:
    """Send the stderr of this process, and of those it starts, to rank `rank`'s file."""
    file = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


class RankStderr:
    """The files of a world's ranks, and how far each was read."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files = [_file(folder, rank) for rank in range(ranks)]
        self._read = [0] * ranks

    def unread(self, rank: int) -> bytes:
        """Bytes that the rank has written since `pass_on`."""
        with suppress(OSError):  # it has not begun to write
            if os.stat(self._files[rank]).st_size > self._read[rank]:
                with self._files[rank].open("rb") as file:
                    file.seek(self._read[rank])
                    return file.read()
        return b""

    def pass_on(self) -> None:
        """Copy unread bytes to this process's stderr."""
        for rank in range(len(self._files)):
            if written := self.unread(rank):
                self._read[rank] += len(written)
                with suppress(OSError, ValueError, AttributeError):  # a user may have closed it
                    sys.stderr.write(written.decode(errors="replace"))


def reason_of_abort(written: bytes) -> str:
    """The message of the exception for which C++ aborted a process, or the last line; "" if nothing was written."""
    text = written.decode(errors="replace")
    lines = _REASON.findall(text) or [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""

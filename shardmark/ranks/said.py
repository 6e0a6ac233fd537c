"""Where ranks write their errors: to files in the world's folder, which the test's process passes on to its own stderr.

C++ says why it ends a process on stderr alone, as Gloo does of messages that do not match. So the report of a rank that
was aborted has it.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

_REASON = re.compile(r"^ *what\(\): *(.+)$", re.MULTILINE)
"""The line in which C++ names an exception that nobody caught."""


def write_to(folder: Path, rank: int) -> None:
    """Let this process, and those it starts, write their stderr to rank `rank`'s file."""
    file = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


class Said:
    """The files of a world's ranks, as far as they were read."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files = [_file(folder, rank) for rank in range(ranks)]
        self._read = [0] * ranks

    def new(self, rank: int) -> bytes:
        """Text that the rank has written since `pass_on`."""
        with suppress(OSError):  # it has not begun to write
            if os.stat(self._files[rank]).st_size > self._read[rank]:
                with self._files[rank].open("rb") as file:
                    file.seek(self._read[rank])
                    return file.read()
        return b""

    def pass_on(self) -> None:
        """Write what is new to this process's stderr."""
        for rank in range(len(self._files)):
            if text := self.new(rank):
                self._read[rank] += len(text)
                with suppress(OSError, ValueError, AttributeError):  # a user may have closed it
                    sys.stderr.write(text.decode(errors="replace"))


def reason(said: bytes) -> str:
    """Why C++ aborted the process that wrote it: the exception's message, or the last line; "" if there is none."""
    text = said.decode(errors="replace")
    lines = _REASON.findall(text) or [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""

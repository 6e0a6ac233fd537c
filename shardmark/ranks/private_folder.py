"""The private folder of a world, in the folder for temporary files; and those that a killed run has left there.

The process that made a folder holds a lock on it. Nobody holds the lock of a folder whose process is gone, whatever
ended it: the next world of the same user removes such a folder.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from unittest.mock import patch

PREFIX = "shardmark-"
LONGEST = 107 - len("/listener-01234567")
"""Bytes of the longest folder path in which multiprocessing can make a socket: a socket's own path has 107 at most."""
NEW = 60.0
"""Seconds in which a folder may not have its lock yet."""
_locks: dict[Path, int] = {}


def make(prefix: str = PREFIX) -> Path:
    """A new folder, readable by this user only, whose name begins with `prefix`; `remove` removes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    _locks[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def remove(folder: Path) -> None:
    """Remove the folder and all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


@cache
def remove_abandoned() -> None:
    """Remove this user's folders whose processes are gone; once in a process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < NEW or folder in _locks:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def make_room_for_sockets() -> None:
    """Have multiprocessing make its sockets in a folder of this kind; in /tmp, as Python 3.14 does, where the path of
    the one for temporary files is too long for a socket."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        too_long = len(os.fsencode(tempfile.gettempdir())) + len(f"/{PREFIX}01234567") > LONGEST
        with patch.object(tempfile, "tempdir", "/tmp" if too_long else tempfile.tempdir):
            folder = make()
        util.Finalize(None, remove, args=(folder,), exitpriority=-100)  # after its users
        config["tempdir"] = str(folder)

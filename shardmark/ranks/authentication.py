"""Authenticate messages between the processes of one launch.

torchrun's store listens on every interface, and its messages are unpickled. So each carries a code made with the
launch's secret key (HMAC, RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from shardmark.ranks.rank import WorldError

VARIABLE = "SHARDMARK_KEY"
"""Environment variable with the key; required where processes are on several machines."""
SHORTEST = 16
"""Bytes of a key that nobody guesses."""
WAIT = 60.0
"""Seconds until the first process has written the key."""
_CODE = hashlib.sha256().digest_size


class Seal:
    """Seals messages and opens those that were sealed with the same key, in the same launch: `launch` is that of
    `of_this_launch`."""

    def __init__(self, key: bytes, launch: bytes = b"") -> None:
        self._key = hmac.digest(key, launch, "sha256")

    def seal(self, message: bytes, name: str) -> bytes:
        """The message with its code. It opens only under the same name."""
        return self._code(message, name) + message

    def open(self, sealed: bytes, name: str) -> bytes:
        """The message. WorldError where it was not sealed with this key, under this name."""
        code, message = sealed[:_CODE], sealed[_CODE:]
        if not hmac.compare_digest(code, self._code(message, name)):
            raise WorldError(f"message {name} was not written by a process of this launch")
        return message

    def _code(self, message: bytes, name: str) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + message, "sha256")


def of_this_launch(store: dist.Store, rank: int, size: int) -> bytes:
    """Bytes from every rank, drawn anew: no message of an earlier launch with the same key opens in this one."""
    shared = dist.PrefixStore("shardmark/launch", store)
    own = secrets.token_bytes(16)
    shared.set(f"{rank}", own)  # type: ignore[arg-type]
    return b"".join(own if other == rank else bytes(shared.get(f"{other}")) for other in range(size))


def launch_key(first: bool, one_machine: bool) -> bytes:
    """The key of this launch: the environment's, or, on one machine, a key that the `first` process writes to a file
    that only its user can read. WorldError, in one line, without one."""
    if given := os.environ.get(VARIABLE):
        if len(given.encode()) < SHORTEST:
            raise WorldError(f"{VARIABLE} has {len(given.encode())} bytes, and a secret has {SHORTEST} at least")
        return given.encode()
    if not one_machine:
        raise WorldError(f"ranks on several machines need a secret of their own: set {VARIABLE} to the same on each")
    file = _file()
    if first:
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as text:
            text.write(secrets.token_hex(32))
        os.replace(new, file)
    end = time.monotonic() + WAIT
    while not file.exists():
        if time.monotonic() > end:
            raise WorldError(f"rank 0 has not written {file}")
        time.sleep(0.01)
    about = file.stat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) != 0o600:
        raise WorldError(f"{file} is not this user's alone")
    return file.read_bytes()


def forget_key() -> None:
    """Remove the file, once every process has read it."""
    _file().unlink(missing_ok=True)


def _file() -> Path:
    """The key's file, named after the process that launched the ranks and its start time."""
    launcher = os.getppid()
    started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    return Path(tempfile.gettempdir()) / f"shardmark-{os.getuid()}-{launcher}-{started}.key"

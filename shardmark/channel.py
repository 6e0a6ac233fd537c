"""Messages between the process that runs the tests and a rank: neither end ever waits past a deadline for the other's.

A message is its length, 8 bytes, and its bytes.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable

_LENGTH = struct.Struct(">Q")
_CHUNK = 2**20
"""Bytes that are read at once."""


class Channel:
    """One end, which takes and gives whole messages and moves what the other end is ready for."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = memoryview(b"")
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Take a message to be sent, after which `move` sends it."""
        self._unsent = memoryview(bytes(self._unsent) + _LENGTH.pack(len(message)) + message)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def move(self) -> bytes | None:
        """Send and receive what can be without waiting: a message that is complete by now, or None.

        Raises EOFError where the other end is gone.
        """
        try:
            if self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it may have answered before it went
            self._unsent = memoryview(b"")
        try:
            chunk = self._end.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not chunk:
            raise EOFError
        self._received += chunk
        return self._message()

    def _message(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if len(self._received) < _LENGTH.size + length:
            return None
        message = bytes(memoryview(self._received)[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        return message

    def close(self) -> None:
        self._end.close()


def ready(channels: Iterable[Channel], others: Iterable[int], end: float) -> set[int]:
    """File descriptors of the channels that can move and of `others` that can be read, at the latest at `end`."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))
    for other in others:
        poll.register(other, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}


def receive(end: socket.socket) -> bytes:
    """A rank's side: the next message, however long it takes to come. EOFError where the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return _exactly(end, length)


def send(end: socket.socket, message: bytes) -> None:
    """A rank's side: a whole message."""
    end.sendall(_LENGTH.pack(len(message)) + message)


def _exactly(end: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        chunk = end.recv(min(_CHUNK, nbytes - len(received)))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)

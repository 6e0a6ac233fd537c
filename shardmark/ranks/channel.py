"""Messages between the test process and a rank; the test process never waits past its deadline.

A message is a header and its bytes. The header names the call that the message belongs to, so that a late answer,
or one from a child that a rank has forked, is not taken for the answer to another call.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterable

_HEADER = struct.Struct(">4sQQ")  # MARK, the call, how many bytes follow
_MARK = b"rank"
AT_ONCE = 2**24
"""Most bytes of memory that a message gets before any of it has arrived."""


class GarbledError(ValueError):
    """The bytes are no message: something else was written to the socket."""


class Channel:
    """The test process's end: queues whole messages, and sends and receives what the other end is ready for."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent: deque[memoryview] = deque()
        self._incoming = _Incoming()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, call: int, message: bytes) -> None:
        """Queue a message; `move` sends it."""
        self._unsent += [memoryview(_HEADER.pack(_MARK, call, len(message))), memoryview(message)]

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def move(self) -> tuple[int, bytearray] | None:
        """Send and receive without waiting. Returns (call, message) if a message is complete by now, else None.

        Raises EOFError where the other end is gone, GarbledError where the bytes received are no message.
        """
        try:
            while self._unsent:
                self._unsent[0] = self._unsent[0][self._end.send(self._unsent[0]) :]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it may have answered before it went
            self._unsent.clear()
        try:
            return self._incoming.move(self._end)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error

    def close(self) -> None:
        self._end.close()


class _Incoming:
    """The next message, as far as it has arrived, in memory of at most twice that size."""

    def __init__(self) -> None:
        self._begin(_HEADER.size, call=None)

    def _begin(self, length: int, call: int | None) -> None:
        self._buffer, self._length, self._call, self._here = bytearray(min(length, AT_ONCE)), length, call, 0

    def move(self, end: socket.socket) -> tuple[int, bytearray] | None:
        """Receive once. Return the message if it is complete, else None. Raise EOFError if the other end is closed."""
        if self._here < self._length:
            if self._here == len(self._buffer):  # what a header claims may never come
                self._buffer.extend(bytes(min(len(self._buffer), self._length - self._here)))
            received = end.recv_into(memoryview(self._buffer)[self._here :])
            if not received:
                raise EOFError
            self._here += received
        if self._here < self._length:
            return None
        if self._call is None:
            mark, call, length = _HEADER.unpack(self._buffer)
            if mark != _MARK:
                raise GarbledError
            self._begin(length, call)
            return None if length else self.move(end)
        call, message = self._call, self._buffer
        self._begin(_HEADER.size, call=None)
        return call, message


def ready(channels: Iterable[Channel], others: Iterable[int], seconds: float) -> set[int]:
    """File descriptors of the channels that can move and of `others` that can be read, after `seconds` at the
    latest."""
    poll = select.poll()
    for channel in channels:
        poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))
    for other in others:
        poll.register(other, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def receive(end: socket.socket) -> tuple[int, bytearray]:
    """A rank's side: the next message and its call, however long it takes to come. EOFError where the other end is
    gone."""
    incoming = _Incoming()
    while (message := incoming.move(end)) is None:
        pass
    return message


def send(end: socket.socket, call: int, message: bytes) -> None:
    """A rank's side: a whole message."""
    end.sendall(_HEADER.pack(_MARK, call, len(message)))
    end.sendall(message)

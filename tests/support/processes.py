"""Other processes on this machine, and the sockets that they listen on."""

import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the process's state, its parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return _status(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or before it was read
        return False


def parent_of(pid: int) -> int:
    """The process that started it; of a rank the server that all ranks are forked from."""
    return int(_status(pid)[1])


def running(tag: str) -> list[str]:
    """Processes with that text in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if tag.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def listeners(pids: Iterable[int]) -> tuple[set[str], list[str]]:
    """Addresses on which these processes listen by TCP, in the caller's network namespace, and paths of their listening
    Unix sockets."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = re.findall("[0-9A-F]{8}", fields[1].partition(":")[0])  # in the machine's byte order
                address = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                addresses.add(socket.inet_ntop(family, address))
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [fields for fields in unix if int(fields[3], 16) & 0x10000 and fields[6] in inodes]
    return addresses, [fields[7] if len(fields) > 7 else "" for fields in listening]


def own_addresses() -> list[str]:
    """Addresses on which this rank listens by TCP."""
    return sorted(listeners([os.getpid()])[0])

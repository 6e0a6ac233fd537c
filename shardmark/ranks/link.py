"""A link of limited bandwidth between two hosts that are both this machine, to see which communication computation
hides.

    with Link("1gbit") as link, World(2, "cpu", link) as world: ...

Each host is a network namespace, the link a veth pair with a token bucket filter at both ends. They have no names, only
this process's open files: however this process ends, they disappear with it and with the ranks that entered them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

INTERFACE = "link0"
"""The link's end, on either host."""
_ADDRESSES = "10.64.0.1/30", "10.64.0.2/30"  # within the two namespaces only, so nothing else can be there
_UNITS = {"mbit": 10**6, "gbit": 10**9}
_LARGEST_PACKETS = 2**17
"""Least bytes that an end lets through at once: two of the largest packets that the kernel hands to a network card."""
_BURST_SECONDS = 2e-4
"""Seconds of traffic that an end lets through at once at high rates, so that a timer that fires late costs nothing."""
_QUEUE = 2**23
"""Bytes that may wait at an end: more than TCP's window, so that nothing is dropped and nothing sent twice."""
_CLONE_NEWNET = 0x40000000


class LinkError(ValueError):
    """A link that cannot be made; one line."""


@dataclass(frozen=True)
class Host:
    """One end of a link, as a process needs it to move there."""

    namespace: str
    interface: str = INTERFACE

    def enter(self) -> None:
        """Move the calling thread, and all that it starts from now on, to this host."""
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            _checked("setns", descriptor, _CLONE_NEWNET)
        finally:
            os.close(descriptor)


class Link:
    """Two hosts joined at `rate` ("1gbit", "100mbit"; 10^9 and 10^6 bits a second) in each direction, until closed.

    The rate counts whole Ethernet frames, as it does on a wire: TCP carries about 95% of it. Raises LinkError, in one
    line, for a rate that is none, without root, iproute2 (`ip` and `tc`) or a kernel that has veth and tbf.
    """

    def __init__(self, rate: str) -> None:
        self.rate = rate
        burst = max(_LARGEST_PACKETS, round(_bits_per_second(rate) / 8 * _BURST_SECONDS))
        _check_machine()
        namespaces = [_in_a_thread(_new_namespace) for _ in _ADDRESSES]
        self._close = weakref.finalize(self, _close_all, namespaces)
        self.hosts = [Host(f"/proc/{os.getpid()}/fd/{namespace}") for namespace in namespaces]
        limit = f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst {burst} limit {_QUEUE + burst}"
        try:
            here, there = self.hosts
            pair = f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {there.namespace}"
            _in_a_thread(lambda: _run_on(here, pair))
            for host, address in zip(self.hosts, _ADDRESSES, strict=True):
                up = [f"ip link set {name} up" for name in ("lo", INTERFACE)]
                commands = [f"ip address add {address} dev {INTERFACE}", limit, *up]
                _in_a_thread(lambda host=host, commands=commands: _run_on(host, *commands))  # type: ignore[misc]
        except BaseException:
            self.close()
            raise

    def host(self, rank: int, size: int) -> Host:
        """The host of that rank: the first half of the ranks (the larger) is on the first host."""
        return self.hosts[2 * rank >= size]

    def close(self) -> None:
        """Close both network namespaces; they disappear with the last rank in them."""
        self._close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bits_per_second(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg]bit)", rate)
    if match is None or float(match[1]) == 0:
        raise LinkError(f"a link's rate is written as 1gbit or 100mbit, not {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def _check_machine() -> None:
    if sys.platform != "linux":
        raise LinkError(f"a link needs Linux's network namespaces, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LinkError("a link between two hosts is made by root, and this user is not")
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise LinkError(f"a link needs iproute2, and there is no {' and no '.join(missing)} on this machine")


def _new_namespace() -> int:
    """A descriptor of a new namespace, which the calling thread enters."""
    _checked("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _run_on(host: Host, *commands: str) -> None:
    host.enter()
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            says = done.stderr.strip() or f"nothing and exits with {done.returncode}"
            raise LinkError(f"no link: `{command}` says {says.splitlines()[0]}")


def _in_a_thread(function: Callable[[], T]) -> T:
    """Call it in a thread of its own: only that thread moves to another namespace, and it then ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _checked(call: str, *args: int) -> None:
    """A call of the C library that Python has from 3.12 on; LinkError says why it failed."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*args):
        raise LinkError(f"no link: {call} says {os.strerror(ctypes.get_errno())}")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

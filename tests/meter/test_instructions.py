"""Machine instructions: counted where the machine counts them, and the reason where it does not."""

from __future__ import annotations

import errno
import os
import platform
import struct
from typing import Any

import pytest

from shardmark.meter import instructions as module
from shardmark.meter.instructions import instructions, why_not_countable
from tests.support.counting import Loops, counted

READ = struct.Struct("=QQQ")


def test_a_longer_loop_has_more_or_the_machine_says_why_not() -> None:
    """About 20 instructions for each of Python's; at least one."""
    if why := why_not_countable():
        assert "\n" not in why
        assert counted(Loops()).instructions is None
        pytest.skip(f"not countable: {why}")
    short, long = (instructions(Loops(iterations)) for iterations in (1000, 1_000_000))
    assert short is not None and long is not None and long - short > 999_000


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(count, enabled, running) that each thread's counter reads; one thread has what the list says."""
    values: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module, "_counter", lambda thread: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(module.fcntl, "ioctl", lambda *arguments: 0)
    monkeypatch.setattr(module.os, "listdir", lambda path: ["1"])
    monkeypatch.setattr(module.os, "read", lambda counter, size: READ.pack(*values.pop(0)))
    return values


@pytest.mark.parametrize(
    ("read", "found"),
    [((1234, 50, 50), 1234), ((1234, 50, 49), None), ((0, 50, 50), None)],
    ids=["all of it", "part of it", "nothing"],
)
def test_a_step_that_was_counted_in_part_is_not_counted(
    read: tuple[int, int, int], found: int | None, planted: list[tuple[int, int, int]]
) -> None:
    planted.append(read)
    assert instructions(Loops(1)) == found


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "the kernel forbids it, see /proc/sys/kernel/perf_event_paranoid"),
        (errno.ENOENT, "the processor shows no such counter, as in most virtual machines"),
        (errno.EMFILE, "[[]Errno 24[]] *"),
    ],
)
def test_the_reason_is_one_line(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "_counter", refuse)
    pytest.LineMatcher([why_not_countable()]).fnmatch_lines([reason])


def test_another_architecture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert why_not_countable() == "the number of perf_event_open is not known on riscv64"

"""Faults that fail their test: a rank raises, ends, hangs, or returns what cannot be sent."""

import ctypes
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.table import HUNG, fails, hangs
from tests.support.ranks import hang_in_c_with_the_interpreter_locked

# It raises.


@fails("raised LookupError: no such shard$")
def raises() -> None:
    raise LookupError("no such shard")


@fails(r"raised SystemExit: usage: shard \[-h\]$")
def exits_with_a_message() -> None:
    sys.exit("usage: shard [-h]")


@fails("raised KeyboardInterrupt$")
def is_interrupted() -> None:
    raise KeyboardInterrupt


class Base(BaseException): ...


@fails(r"raised .*Base: not an Exception$")
def raises_a_base_exception() -> None:
    raise Base("not an Exception")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> tuple:
        raise ValueError


@fails(r"raised .*Speechless: <exception str\(\) failed>$")
def raises_what_has_no_text() -> None:
    raise Speechless


class Spiteful(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ValueError


@fails("raised Spiteful, which cannot be shown$")
def raises_what_cannot_be_shown() -> None:
    raise Spiteful


class OfTheRank(Exception):
    """Made anew on a rank alone."""

    def __reduce__(self) -> tuple:
        return _only_on_a_rank, (OfTheRank,)


def _only_on_a_rank(kind: Any) -> Any:
    if not dist.is_initialized():
        sys.exit("elsewhere")
    return kind()


@fails("raised .*OfTheRank: here$")
def raises_what_cannot_be_made_elsewhere() -> None:
    raise OfTheRank("here")


@fails(r"raised ValueError: \\x1b\[2Jgone$")
def raises_what_would_clear_the_screen() -> None:
    raise ValueError("\x1b[2Jgone")


@fails(r"raised ValueError: x+\.\.\. \(10,000,019 characters\)$")
def raises_ten_million_characters() -> None:
    raise ValueError("x" * 10**7)


@fails("raised RecursionError: maximum recursion depth exceeded")
def recurses() -> None:
    def deeper() -> None:
        deeper()

    deeper()


@fails("raised LookupError: no such shard$")
def destroys_its_group_on_its_way_out() -> None:
    try:
        raise LookupError("no such shard")
    finally:  # as scripts do; the others fail at once, and this rank later
        dist.destroy_process_group()
        time.sleep(0.2)


@fails("raised LookupError: no such shard$")
def destroys_its_group_and_takes_its_time() -> None:
    try:
        raise LookupError("no such shard")
    finally:
        dist.destroy_process_group()
        time.sleep(2)


# It runs out of memory.


@fails("raised MemoryError$")
def allocates_all_that_it_may() -> None:
    _limit_memory()
    kept = []
    while True:
        kept.append(bytearray(2**20))


@fails(r"raised RuntimeError: .*can't allocate memory")
def allocates_tensors_beyond_its_limit() -> None:
    _limit_memory()
    kept = []
    while True:
        kept.append(torch.ones(2**20))


def _limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))


# It ends, or is ended.


@fails("exited with 0$")
def ends_as_if_all_were_well() -> None:
    os._exit(0)


@fails(r"was killed by SIGKILL: did the machine run out of memory\?$")
def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@fails("was killed by SIGTERM$")
def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@fails(r"was killed by SIGSEGV: was a tensor read after its memory was freed\?$")
def reads_nowhere() -> None:
    ctypes.string_at(0)


@fails("was killed by SIGABRT: no such shard$")
def aborts() -> None:
    os.write(2, b"terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such shard\n")
    os.abort()


@fails("exited with 4$")
def ends_with_a_daemon_left() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(4)


@fails("closed its connection to the test$")
def becomes_another_program() -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


class EndsItsProcess:
    def __del__(self) -> None:
        os._exit(7)


@fails("exited with 7$", everywhere=True)
def leaves_garbage_that_ends_its_process() -> None:
    one = EndsItsProcess()
    one.itself = one  # type: ignore[attr-defined]


# It hangs.


@hangs(r"it was in sleeps \(that_fail\.py:\d+\)$")
def sleeps() -> None:
    time.sleep(1000)


@hangs(r"it was in barrier, called in meet \(table\.py:\d+\)$", ranks="0")
def skips_a_collective() -> None:
    """Rank 1 has no part in it."""


@hangs("it was in match, called in hang_in_c_with_the_interpreter_locked")
def hangs_in_c() -> None:
    hang_in_c_with_the_interpreter_locked()


@hangs("a signal such as SIGSTOP has stopped it$")
def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@hangs(r"it was in blocks_its_signals \(that_fail\.py:\d+\)$")
def blocks_its_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    time.sleep(1000)


# Replies that cannot be sent or unpickled, and broken connections.


@fails("raised (AttributeError|PicklingError|.*): .*[Pp]ickle", everywhere=True)
def returns_a_lambda() -> object:
    return lambda: None


class EndsTheRank:
    def __reduce__(self) -> tuple:
        os._exit(5)


@fails("exited with 5$", everywhere=True)
def returns_what_ends_its_rank() -> object:
    return EndsTheRank()


class EndsWhoReadsIt:
    def __reduce__(self) -> tuple:
        return _only_on_a_rank, (EndsWhoReadsIt,)


@fails(r"sent a reply that cannot be unpickled here: SystemExit\('elsewhere'\)$", everywhere=True)
def returns_what_ends_its_reader() -> object:
    return EndsWhoReadsIt()


class InterruptsWhoReadsIt:
    def __reduce__(self) -> tuple:
        return _interrupt, ()


def _interrupt() -> None:
    if not dist.is_initialized():
        raise KeyboardInterrupt


@fails(r"sent a reply that cannot be unpickled here: KeyboardInterrupt\(\)$", everywhere=True)
def returns_what_interrupts_its_reader() -> object:
    return InterruptsWhoReadsIt()


class HoldsItsReader:
    def __reduce__(self) -> tuple:
        return _sleep_elsewhere, ()


def _sleep_elsewhere() -> None:
    if not dist.is_initialized():
        time.sleep(1000)


@fails(r"sent a reply that was not unpickled here within \d\.\d s$", everywhere=True, deadline=HUNG)
def returns_what_holds_its_reader() -> object:
    return HoldsItsReader()


def _write_to_sockets(data: bytes) -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(int(number), data)


@hangs(r"it was in claims_a_huge_answer \(that_fail\.py:\d+\)$", ranks=r"\d", everywhere=True)
def claims_a_huge_answer() -> None:
    _write_to_sockets(struct.pack(">4sQQ", b"rank", 0, 2**43))
    time.sleep(1000)


@fails("wrote to the socket of its answers$", everywhere=True)
def writes_to_its_sockets() -> None:
    _write_to_sockets(b"\xff" * 64)


@fails(r"(exited with 1: OSError: its connection to the test is closed|was killed by SIGABRT)", everywhere=True)
def closes_all_its_files() -> None:
    os.closerange(3, 1024)

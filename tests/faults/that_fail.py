"""Faults on rank 1 that fail their test: it raises, ends, hangs, or answers what nobody can read."""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.table import fails, hangs, meet, on_rank_1
from tests.support.ranks import hang_in_c_with_the_interpreter_locked

# It raises.


@fails("raised LookupError: no such shard$")
def raises() -> None:
    if on_rank_1():
        raise LookupError("no such shard")
    meet()


@fails("raised SystemExit: 3$")
def exits() -> None:
    if on_rank_1():
        sys.exit(3)
    meet()


@fails(r"raised SystemExit: usage: shard \[-h\]$")
def exits_with_a_message() -> None:
    if on_rank_1():
        sys.exit("usage: shard [-h]")
    meet()


@fails("raised KeyboardInterrupt$")
def is_interrupted() -> None:
    if on_rank_1():
        raise KeyboardInterrupt
    meet()


class Base(BaseException): ...


@fails(r"raised .*Base: not an Exception$")
def raises_a_base_exception() -> None:
    if on_rank_1():
        raise Base("not an Exception")
    meet()


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> tuple:
        raise ValueError


@fails(r"raised .*Speechless: <exception str\(\) failed>$")
def raises_what_has_no_text() -> None:
    if on_rank_1():
        raise Speechless
    meet()


class Spiteful(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ValueError


@fails("raised Spiteful, which cannot be shown$")
def raises_what_cannot_be_shown() -> None:
    if on_rank_1():
        raise Spiteful
    meet()


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
    if on_rank_1():
        raise OfTheRank("here")
    meet()


@fails(r"raised ValueError: \\x1b\[2Jgone$")
def raises_what_would_clear_the_screen() -> None:
    if on_rank_1():
        raise ValueError("\x1b[2Jgone")
    meet()


@fails(r"raised ValueError: x+\.\.\. \(10,000,019 characters\)$")
def raises_ten_million_characters() -> None:
    if on_rank_1():
        raise ValueError("x" * 10**7)
    meet()


@fails("raised RecursionError: maximum recursion depth exceeded")
def recurses() -> None:
    def deeper() -> None:
        deeper()

    if on_rank_1():
        deeper()
    meet()


# It runs out of memory.


@fails("raised MemoryError$")
def is_out_of_memory() -> None:
    if on_rank_1():
        raise MemoryError
    meet()


@fails("raised MemoryError$")
def allocates_all_that_it_may() -> None:
    if on_rank_1():
        _limit_memory()
        kept = []
        while True:
            kept.append(bytearray(2**20))
    meet()


@fails(r"raised RuntimeError: .*can't allocate memory")
def allocates_tensors_beyond_its_limit() -> None:
    if on_rank_1():
        _limit_memory()
        kept = []
        while True:
            kept.append(torch.ones(2**20))
    meet()


def _limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))


# It ends, or is ended.


@fails("exited with 3$")
def ends_at_once() -> None:
    if on_rank_1():
        os._exit(3)
    meet()


@fails("exited with 0$")
def ends_as_if_all_were_well() -> None:
    if on_rank_1():
        os._exit(0)
    meet()


@fails(r"was killed by SIGKILL: did the machine run out of memory\?$")
def is_killed() -> None:
    if on_rank_1():
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


@fails("was killed by SIGTERM$")
def is_terminated() -> None:
    if on_rank_1():
        os.kill(os.getpid(), signal.SIGTERM)
    meet()


@fails(r"was killed by SIGSEGV: was a tensor read after its memory was freed\?$")
def reads_nowhere() -> None:
    if on_rank_1():
        ctypes.string_at(0)
    meet()


@fails("was killed by SIGABRT$")
def aborts() -> None:
    if on_rank_1():
        os.abort()
    meet()


@fails("exited with 4$")
def ends_while_its_child_holds_its_pipes() -> None:
    if on_rank_1():
        if os.fork() == 0:
            time.sleep(600)
        os._exit(4)
    meet()


@fails("exited with 4$")
def ends_with_a_daemon_left() -> None:
    if on_rank_1():
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(4)
    meet()


# It hangs.


@hangs(r"it was in sleeps \(that_fail\.py:\d+\)$")
def sleeps() -> None:
    if on_rank_1():
        time.sleep(1000)
    meet()


@hangs(r"it was in barrier, called in meet \(table\.py:\d+\)$", ranks="0")
def skips_a_collective() -> None:
    if not on_rank_1():
        meet()


@hangs("it was in match, called in hang_in_c_with_the_interpreter_locked")
def hangs_in_c() -> None:
    if on_rank_1():
        hang_in_c_with_the_interpreter_locked()
    meet()


@hangs("a signal such as SIGSTOP has stopped it$")
def is_stopped() -> None:
    if on_rank_1():
        os.kill(os.getpid(), signal.SIGSTOP)
    meet()


@hangs(r"it was in blocks_its_signals \(that_fail\.py:\d+\)$")
def blocks_its_signals() -> None:
    if on_rank_1():
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
        time.sleep(1000)
    meet()


# What it returns is not what can be sent.


@fails("raised (AttributeError|PicklingError|.*): .*[Pp]ickle", ranks=r"\d")
def returns_a_lambda() -> object:
    return lambda: None


class EndsTheRank:
    def __reduce__(self) -> tuple:
        os._exit(5)


@fails("exited with 5$", ranks=r"\d")
def returns_what_ends_its_rank() -> object:
    return EndsTheRank()


class EndsWhoReadsIt:
    def __reduce__(self) -> tuple:
        return _only_on_a_rank, (EndsWhoReadsIt,)


@fails(r"sent a reply that cannot be unpickled here: SystemExit\('elsewhere'\)$", ranks=r"\d")
def returns_what_ends_its_reader() -> object:
    return EndsWhoReadsIt()


@fails("wrote to the socket of its answers$", ranks=r"\d")
def writes_to_its_sockets() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(int(number), b"\xff" * 64)


@fails(r"(exited with 1: OSError: its connection to the test is closed|was killed by SIGABRT)")
def closes_all_its_files() -> None:
    if on_rank_1():
        os.closerange(3, 1024)

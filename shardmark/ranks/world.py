"""Ranks in a process group, kept warm between tests, replaced when they fail.

    with World(2, "cpu") as world:
        world.run(all_reduce_of_ones, 1024)  # [result of rank 0, result of rank 1]

Ranks come from a forkserver that has torch imported already, meet through a file in a private directory, and talk over
the loopback interface, or over a `shardmark.ranks.link.Link` between two hosts. They never outlive the process that
started them.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import multiprocessing.forkserver  # it keeps the server; pytest in a test would forget it, and start another
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardmark.api.registry import FAMILIES
from shardmark.ranks import private_folder
from shardmark.ranks.answers import unpickled, unusable
from shardmark.ranks.channel import Channel, GarbledError, ready
from shardmark.ranks.checkout import Checkout
from shardmark.ranks.endings import end_of_process, end_ranks, how_it_ended, where_they_are
from shardmark.ranks.failures import Failure, failures_of, is_left_alone, rank_error
from shardmark.ranks.failures import RankError as RankError  # an error that `run` raises
from shardmark.ranks.idle import Idle
from shardmark.ranks.left_behind import Left
from shardmark.ranks.link import Link
from shardmark.ranks.nccl import explanation
from shardmark.ranks.patience import Patience
from shardmark.ranks.rank import Answer, WorldError, available_cores, pickled_call, ranks_met, serve
from shardmark.ranks.rank_stderr import RankStderr

DEADLINE = 120.0
"""Seconds that a call may take on a world before its ranks count as hung."""
GRACE = 1.0
"""Seconds that the other ranks get to answer once one has failed."""
TO_END = 10.0
"""Seconds that a rank gets to end once it has closed its connection, so that it is known how: on a busy machine."""
TO_SAY_WHY = 10.0
"""Seconds that a rank gets to fail where the others have failed only because it closed their connections."""
PRELOADED = [
    "shardmark.ranks.preload",
    "__main__",
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.distributed.optim",
]
PRELOADED += ["shardmark.ranks.rank", "pytest"]
"""Modules imported once in the server instead of once in every rank, as are the registered families: DTensor's
operators need dynamo, test modules need pytest, and importing torch.distributed.optim compiles code for half a
second."""
_SIOCGIFFLAGS = 0x8913
PROBE = 5.0
"""Seconds that ranks get for the collective that shows whether they are in step."""
RANKS_PER_CORE = 8
"""Ranks that may share a core: enough for correctness at any world size, too many to measure."""


def available_ranks(device: str) -> int:
    """The largest world this machine allows: a rank per GPU on CUDA, `RANKS_PER_CORE` per core on CPU."""
    return torch.cuda.device_count() if device == "cuda" else RANKS_PER_CORE * available_cores()


def check_size(size: int, device: str) -> None:
    """WorldError, in one line, for a world larger than the machine allows."""
    allowed = available_ranks(device)
    if size > allowed and device == "cuda":
        raise WorldError(f"{size} ranks need {size} CUDA devices, and this machine has {allowed}")
    if size > allowed:
        raise WorldError(
            f"{size} ranks are more than this machine allows: {allowed} "
            f"({RANKS_PER_CORE} for each of {available_cores()} cores)"
        )
    if size < 1:
        raise WorldError(f"a world has at least one rank, not {size}")


class World:
    """`size` ranks of one process group (NCCL on "cuda", Gloo on "cpu"), each a process that waits for work.

    With a `link`, half of the ranks live on each of its hosts; with a `checkout`, they run another version of the code.
    Raises WorldError when the machine does not allow that many, OSError without a loopback interface, RankError when
    they do not come up.
    """

    def __init__(
        self, size: int, device: str = "cpu", link: Link | None = None, checkout: Checkout | None = None
    ) -> None:
        check_size(size, device)
        if device == "cpu" and link is None and not _loopback_is_up():
            raise OSError(errno.ENETDOWN, "ranks talk over the loopback interface, and it is down: ip link set lo up")
        self.size = size
        self.device = device
        self.deadline = DEADLINE
        self._kind = (size, device, link, checkout)
        self.tests: dict[str, None] = {}
        """Ids of the tests that have used it, in order."""
        private_folder.remove_abandoned()
        self._directory = private_folder.make()
        # At the interpreter's end too, for a world that nobody closed.
        self._remove_directory = weakref.finalize(self, private_folder.remove, self._directory)
        self._stderr = RankStderr(self._directory, size)
        self._call = 0
        """The number of the call that is under way; joining the group is call 0."""
        self._channels: list[Channel] = []
        self._processes: list[Any] = []
        self._ends: list[int] = []
        """A descriptor for each rank that can be read once the rank has ended, whoever holds its socket."""
        private_folder.make_room_for_sockets()
        context = multiprocessing.get_context("forkserver")
        families = {family.contract.__module__: None for family in FAMILIES.values()}
        context.set_forkserver_preload([*PRELOADED, *families])
        try:
            for rank in range(size):
                ours, theirs = socket.socketpair()
                self._channels.append(Channel(ours))
                host = link.host(rank, size) if link else None
                with theirs:
                    process = context.Process(
                        target=serve, args=(rank, size, device, self._directory, host, checkout, theirs), daemon=True
                    )
                    process.start()
                self._processes.append(process)
                self._ends.append(end_of_process(process))
            joined = self._collect(DEADLINE)  # each rank answers once it has joined the group
            if failures := failures_of(joined):
                raise self._error(failures, {})
            self._idle = Idle(self.pids)
            self._last = ""
            """The name of the last call."""
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """Call `function(*args)` on every rank and return the results in rank order.

        `function` is module-level and, like `args` and the results, goes by pickle: tensors are copied. RankError
        reports a rank that raised, died, or had not answered after `deadline` seconds, by default the world's own. The
        world is closed then, unless every rank raised and all are fit for the next call.
        """
        __tracebackhide__ = True  # pytest shows the test's line, and what the ranks say
        if not self._processes:
            raise WorldError("this world is closed: a rank failed, or close() was called")
        work = pickled_call(function, args)
        try:
            self._send(work)
            answers = self._collect(self.deadline if deadline is None else deadline)
            failures = failures_of(answers)
            left = Left(function, answers, len(failures) in (0, self.size) and self._in_step(answers))
            self._last = left.name
            self._idle.begin()
        except BaseException:  # Ctrl-C too: ranks that are still at work are of no use to the next test
            self.close()
            raise
        error = self._error(failures, {}) if failures else None  # with logs that go with the world
        if left.broken:
            self.close()
        if error is not None:
            raise error
        left.warn()  # last, as a warning may be an error
        return [answers[rank].value for rank in range(self.size)]

    def _in_step(self, answers: dict[int, Answer]) -> bool:
        """Whether all ranks meet in the next collective; asked where ranks raised or began different numbers of
        collectives."""
        same = len({answer.collectives for answer in answers.values()}) == 1 and not failures_of(answers)
        if same or any(answer.broken for answer in answers.values()):
            return True
        self._send(pickled_call(ranks_met, (self.device,)))
        try:
            met = self._collect(PROBE)
        except RankError:
            return False
        return all(answer.value == list(range(self.size)) for answer in met.values())

    def _send(self, work: bytes) -> None:
        self._call += 1
        for channel in self._channels:
            channel.send(self._call, work)

    @property
    def alive(self) -> bool:
        """Whether every rank can take work."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def busy(self) -> str | None:
        """The last call and the ranks that it left at work, in words; None where they have been idle since."""
        ranks = self._idle.busy() if self._last and self.alive else []
        where = ", ".join(map(str, ranks))
        return f"{self._last} left on rank {where}: a process or a thread at work" if ranks else None

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [process.pid for process in self._processes]

    def another(self) -> World:
        """New ranks of the same kind, which the caller closes."""
        return World(*self._kind)

    def close(self) -> None:
        """End every rank and remove the private directory. A closed world stays closed."""
        end_ranks(self._processes, self._directory)
        self._stderr.pass_on()
        for channel in self._channels:
            channel.close()
        for end in self._ends:
            os.close(end)
        self._processes, self._channels, self._ends = [], [], []
        self._remove_directory()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, deadline: float) -> dict[int, Answer]:
        """Return each rank's answer; see `_answers`. Their stderr is passed on, whatever becomes of the call."""
        __tracebackhide__ = True
        try:
            return self._answers(deadline)
        finally:
            self._stderr.pass_on()

    def _answers(self, deadline: float) -> dict[int, Answer]:
        """Return each rank's answer, in order of arrival. Raise RankError if a rank died or did not answer; the report
        names the dead ones before those that waited for them."""
        __tracebackhide__ = True
        answers: dict[int, Answer] = {}
        dead: dict[int, Failure] = {}
        patience = Patience(deadline)
        while waiting := [rank for rank in range(self.size) if rank not in answers.keys() | dead.keys()]:
            moved = ready([self._channels[r] for r in waiting], [self._ends[r] for r in waiting], patience.slice)
            for rank in waiting:
                try:
                    message = self._channels[rank].move() if self._channels[rank].fileno() in moved else None
                    if message is None and self._ends[rank] in moved and self._channels[rank].fileno() not in moved:
                        raise EOFError  # it has ended, and nothing that it sent is left
                except EOFError:
                    dead[rank] = (
                        how_it_ended(self._processes[rank], rank, self._directory, self._stderr, TO_END),
                        None,
                    )
                    continue
                except GarbledError:
                    answers[rank] = unusable("wrote to the socket of its answers")
                    continue
                if message is not None and message[0] == self._call:
                    began = time.monotonic()
                    answers[rank] = unpickled(message[1], patience.left)
                    patience.spend(time.monotonic() - began)
            if failures := [*dead.values(), *failures_of(answers).values()]:
                # The others are likely to be waiting for it in a collective; the one that left them says why.
                patience.shorten(TO_SAY_WHY if all(map(is_left_alone, failures)) else GRACE)
            if patience.is_over():
                break
        if len(answers) < self.size:
            seconds = patience.waited
            silent = {r: self._processes[r] for r in range(self.size) if r not in answers.keys() | dead.keys()}
            where = where_they_are(silent, self._directory, seconds, GRACE)
            raise self._error(dead | failures_of(answers), where)
        return answers

    def _error(self, failures: Mapping[int, Failure], silent: Mapping[int, str]) -> RankError:
        """The error that reports each rank, with what NCCL says of it."""
        error = rank_error(self.size, failures, silent)
        if self.device == "cuda" and (more := explanation(self._directory, error)):
            error.args = (f"{error}\n{more}",)
        return error


def _loopback_is_up() -> bool:
    """Whether the interface "lo" carries traffic; True where this cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        except OSError:
            return True
    return bool(struct.unpack_from("H", answer, 16)[0] & 1)

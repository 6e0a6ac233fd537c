"""The ranks that torchrun started, as a world: rank 0 runs pytest, the others serve it.

    torchrun --nproc-per-node 4 -m pytest correctness

On one machine or many: calls and answers go through torchrun's own store, so nothing but torch is needed in between.
The store listens on every interface, so these messages are sealed. (A store takes bytes; its annotation says str.)
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardmark.ranks.answers import unpickled
from shardmark.ranks.authentication import Seal, forget_key, launch_key, of_this_launch
from shardmark.ranks.failures import RankError, failures_of, is_left_alone, rank_error
from shardmark.ranks.heartbeat import CLOSED, LOST, Heartbeat, end_without_store
from shardmark.ranks.left_behind import Left
from shardmark.ranks.patience import Patience
from shardmark.ranks.rank import (
    Answer,
    WorldError,
    join_group,
    perform,
    pickled_call,
    ranks_met,
    threads_of_a_rank,
)
from shardmark.ranks.world import DEADLINE, GRACE, PROBE, TO_SAY_WHY

_FOREVER = timedelta(days=30)
_STOP = b""
_POLL = 0.005
"""Seconds between looks at the store: short beside a test, rare beside a step."""
_DEAD = "has ended; torchrun's own output says how"
_LOST = f"has not been heard of for {LOST:.0f} s: has its host stopped, or is the network down?"


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank() -> int:
    """This process's rank among those torchrun started."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """Number of ranks that torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def _one_machine() -> bool:
    return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]


def _join(device: str) -> tuple[dist.Store, Seal, Heartbeat | None]:
    """Join the process group. Return the store that carries calls and answers, their seal, and on several machines the
    heartbeat."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    key = launch_key(first=rank() == 0, one_machine=_one_machine())
    if _one_machine():  # as the ranks of `World`
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store, rank_, size = next(dist.rendezvous("env://"))
    seal = Seal(key, of_this_launch(store, rank_, size))
    join_group(
        dist.PrefixStore("shardmark/group", store), rank_, size, device, local_rank, threads_of_a_rank(local_size)
    )
    dist.barrier()
    if rank_ == 0:
        forget_key()  # by now every rank has it
    others = range(1, size) if rank_ == 0 else ()
    heartbeat = None if _one_machine() else Heartbeat(store, rank_, others)
    return dist.PrefixStore("shardmark/calls", store), seal, heartbeat


def serve(device: str) -> None:
    """Answer rank 0's calls until it says stop; torchrun's SIGTERM ends a rank that is stuck."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store, seal, heartbeat = _join(device)
    call = 0
    while True:
        try:
            store.wait([f"{call}"], _FOREVER)
        except dist.DistNetworkError:
            end_without_store(CLOSED)
        message = seal.open(store.get(f"{call}"), f"{call}")
        if message == _STOP:
            if heartbeat is not None:
                heartbeat.close()
            return
        deadline, work = pickle.loads(message)
        faulthandler.dump_traceback_later(deadline)  # a hung rank shows its stack where torchrun shows its errors
        name = f"{call}/{rank()}"
        store.set(name, seal.seal(perform(work), name))  # type: ignore[arg-type]
        faulthandler.cancel_dump_traceback_later()
        call += 1


class TorchrunWorld:
    """`shardmark.ranks.world.World`'s interface over torchrun's ranks. Made once, on rank 0.

    Only torchrun can replace ranks: after one has died, hung or become unfit for the next call, the world is no longer
    alive. torchrun ends a run when a rank of it has ended; `ending` is called before, with one line that says so.
    """

    def __init__(self, device: str, ending: Callable[[str], object]) -> None:
        self.size = world_size()
        self.device = device
        self.alive = True
        self.deadline = DEADLINE
        self.lost_by = ""
        """The reason why the world is lost, in one line."""
        self._store, self._seal, self._heartbeat = _join(device)
        self._call = 0
        self._ending = ending
        self._ends: dict[int, int] = {}
        """A descriptor for each other rank on this machine that can be read once the rank has ended."""
        self._hosts: dict[int, str] = {}
        """Where each rank is, on several machines."""
        if self._heartbeat is not None:
            self._hosts = {rank_: answer.value for rank_, answer in self._ask(socket.gethostname, (), DEADLINE).items()}
        else:
            processes = self._ask(os.getpid, (), DEADLINE)
            with suppress(AttributeError, OSError):  # no Linux of 2019 or later
                self._ends = {rank_: os.pidfd_open(processes[rank_].value) for rank_ in range(1, self.size)}

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """Call `function(*args)` on every rank; see `World.run`."""
        __tracebackhide__ = True
        if not self.alive:
            raise WorldError(self.lost_by)
        try:
            answers = self._ask(function, args, self.deadline if deadline is None else deadline)
            left = Left(function, answers, self._in_step(answers), "torchrun's ranks cannot be replaced")
        finally:
            name = getattr(function, "__qualname__", repr(function))
            self.lost_by = f"{name} has ended torchrun's ranks, which cannot be replaced from here"
        if left.broken:
            self.alive = False
        left.warn()
        return [answers[rank_].value for rank_ in range(self.size)]

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> dict[int, Answer]:
        __tracebackhide__ = True
        work = pickled_call(function, args)
        call, self._call = self._call, self._call + 1
        self._send(call, pickle.dumps((deadline, work)))
        # Our own share runs in a thread: if another rank fails, we may be stuck in a collective with it.
        own: list[bytes] = []
        self._own_share = threading.Thread(target=self._perform_own, args=(work, own), daemon=True)
        self._own_share.start()
        answers: dict[int, Answer] = {}
        patience = Patience(deadline, process=os.getppid())  # torchrun has started the other ranks as well
        try:
            while len(answers) < self.size and not self._gone(answers):
                if patience.is_over() and not self._doubtful(answers):
                    break
                self._own_share.join(_POLL)
                for other in range(self.size):
                    if other not in answers and (answer := self._answer(call, other, own)) is not None:
                        began = time.monotonic()
                        answers[other] = unpickled(answer, patience.left)
                        patience.spend(time.monotonic() - began)
                if so_far := [*failures_of(answers).values()]:  # the others are likely to be waiting for it
                    patience.shorten(TO_SAY_WHY if all(map(is_left_alone, so_far)) else GRACE)
        except KeyboardInterrupt:
            if not self._gone(answers):  # else torchrun ends the run, as a rank has ended
                raise
        self.alive = len(answers) == self.size
        failures = failures_of(answers)
        if gone := self._gone(answers):
            first, how = next(iter(gone.items()))
            self._ending(f"rank {first} of {self.size} {how}")
            failures = {rank_: (how, None) for rank_, how in gone.items()} | failures
        if failures or not self.alive:
            if self.alive and (any(each.broken for each in answers.values()) or not self._in_step(answers)):
                self.alive = False
            seconds = f"had not answered after {patience.waited:.1f} s"
            silent = {rank_: seconds for rank_ in range(self.size) if rank_ not in answers | failures}
            silent |= {rank_: f"{seconds}; its stack is in its own output" for rank_ in silent if rank_ > 0}
            if 0 in silent and (frame := sys._current_frames().get(self._own_share.ident or 0)):
                stack = traceback.extract_stack(frame)
                names = [each.name for each in stack]
                frames = stack[names.index("perform") + 1 :] if "perform" in names else stack
                silent[0] = f"{seconds}; it was in {frames[-1].name}\n{''.join(traceback.format_list(frames)).rstrip()}"
            raise rank_error(self.size, failures, silent)
        self._store.delete_key(f"{call}")
        return answers

    def _in_step(self, answers: dict[int, Answer]) -> bool:
        """See `World._in_step`."""
        if any(answer.broken for answer in answers.values()) or len({a.collectives for a in answers.values()}) == 1:
            return True
        try:
            met = self._ask(ranks_met, (self.device,), PROBE)
        except RankError:
            return False
        return all(answer.value == list(range(self.size)) for answer in met.values())

    def close(self) -> None:
        """End the other ranks: those that still serve stop, and torchrun ends those that hang."""
        self._send(self._call, _STOP)
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self.alive:
            dist.destroy_process_group()
        self.alive = False
        if self._own_share.is_alive():  # in a collective that does not end: Python's own way to end would abort there
            atexit.register(_exit_at_once)
        while self._ends:
            os.close(self._ends.popitem()[1])

    def _gone(self, answers: dict[int, Answer]) -> dict[int, str]:
        """Ranks that can no longer answer, each with the reason."""
        ended = select.select(self._ends.values(), [], [], 0)[0]
        gone = {rank_: _DEAD for rank_, end in self._ends.items() if end in ended}
        if self._heartbeat is not None:
            gone |= {rank_: f"on {self._hosts.get(rank_, 'its host')} {_LOST}" for rank_ in self._heartbeat.lost()}
        return {rank_: how for rank_, how in gone.items() if rank_ not in answers}

    def _doubtful(self, answers: dict[int, Answer]) -> bool:
        """Whether the heartbeat of a rank that has not answered is late too: its host may be lost."""
        return self._heartbeat is not None and not answers.keys() >= set(self._heartbeat.doubtful())

    def _perform_own(self, work: bytes, own: list[bytes]) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # the current device is each thread's own
        own.append(perform(work))

    def _answer(self, call: int, rank_: int, own: list[bytes]) -> bytes | None:
        """The rank's answer to that call; None until it arrives."""
        if rank_ == 0:
            return own[0] if own else None
        key = f"{call}/{rank_}"
        if not self._store.check([key]):
            return None
        answer = self._store.get(key)
        self._store.delete_key(key)
        return self._seal.open(answer, key)

    def _send(self, call: int, message: bytes) -> None:
        self._store.set(f"{call}", self._seal.seal(message, f"{call}"))  # type: ignore[arg-type]


def _exit_at_once() -> None:
    """Exit without waiting for other ranks, after a failed call."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

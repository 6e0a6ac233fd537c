"""Random histories of collectives: started in several groups, waited for in each rank's own order, also twice
or never."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from correctness.collectives.summing import Call, largest, small_integers
from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import UNSORTED, hold_on_ranks
from correctness.support.on_ranks import assert_nothing_wrong
from correctness.support.waiting import wait_until
from impl.collectives.cases import COLLECTIVES
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("collectives")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)

PATIENCE = 20.0
"""Timeout of a wait in seconds, below the world's deadline: a hang is then reported in one line."""


@dataclass(frozen=True)
class Start:
    """One collective, in the `which`-th group of these ranks."""

    number: int
    name: str
    elements: int
    dtype: torch.dtype
    options: dict[str, Any]
    async_op: bool
    ranks: tuple[int, ...]
    which: int

    def __str__(self) -> str:
        how = [f"{option}={value}" for option, value in self.options.items()]
        how += ["async_op=True"] * self.async_op + [f"in group {self.which} of ranks {[*self.ranks]}"]
        return ", ".join([f"collective {self.number}: {self.name}", f"{self.elements} elements", *how])


@dataclass(frozen=True)
class Starts:
    """Several starts: at once, in each rank's own order, or one after another. Between and after them each rank
    waits for some of those under way, in its own order; `seed` draws it."""

    starts: tuple[Start, ...]
    at_once: bool
    seed: int

    def __str__(self) -> str:
        first = self.starts[0]
        if self.at_once and len(self.starts) > 1:
            return "start, each rank in its own order: " + "; ".join(map(str, self.starts))
        more = f", and {len(self.starts) - 1} more like it, one after another" if len(self.starts) > 1 else ""
        return f"start {first}{more}; then each rank waits for some"


@dataclass(frozen=True)
class WaitForAll:
    seed: int

    def __str__(self) -> str:
        return "each rank waits for all that are under way, in its own order"


@dataclass(frozen=True)
class History:
    events: list[Starts | WaitForAll]

    def __str__(self) -> str:
        return ""


def small_numbers() -> st.SearchStrategy[int]:
    return st.integers(0, 2**20)


@st.composite
def histories(draw: st.DrawFn, ranks: int, mixed: bool) -> History:
    order, everyone, cut = draw(st.permutations(range(ranks))), tuple(range(ranks)), draw(st.integers(1, ranks))
    groups = [(everyone, 0), (everyone, 1)]
    groups += [(tuple(part), 0) for part in (order[:cut], order[cut:]) if part and len(part) < ranks]
    groups += [(tuple(order), 2)]
    if not UNSORTED:
        groups = [(tuple(sorted(members)), which) for members, which in groups]
    numbers = count(1)

    def start(asynchronous: bool) -> Start:
        name, (members, which) = draw(st.sampled_from(COLLECTIVES)), draw(st.sampled_from(groups))
        gaps = [draw(st.sampled_from([0, 1, 3, 16])) for _ in range(2 if name == "all_reduce" else 3)]
        options = [{}, {"gaps": gaps}, {"gaps": gaps, "swapped": True}, {"in_place": name != "all_reduce"}]
        size = draw(st.sampled_from([0, 1, 1, 5, 97, 97, 1000, 1000, 300_007]))
        is_async = asynchronous or not draw(one_in(4))
        dtype, option = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(options))
        return Start(next(numbers), name, size, dtype, option, is_async, members, which)

    def following() -> Starts:
        kind = draw(st.sampled_from(["one"] * 6 + ["many alike"] + ["mixed"] * 2 * mixed))
        starts = [start(asynchronous=kind != "one")]
        if kind == "mixed":
            starts += [start(asynchronous=True) for _ in range(draw(st.integers(1, 7)))]
        elif kind == "many alike":  # finds a fixed number of buffers used in rotation
            alike = replace(starts[0], elements=min(starts[0].elements, 97))
            more = draw(st.sampled_from([8, 16, 32, 64, 139]))
            starts = [alike, *(replace(alike, number=next(numbers)) for _ in range(more))]
        return Starts((*starts,), kind == "mixed", draw(small_numbers()))

    return History([*events_of(draw, 9, following), WaitForAll(draw(small_numbers()))])


class Waiting:
    """The collectives of a history on this rank; it draws its own waits between the starts."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        self.target, self.device = implementation.watched, device
        self.rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
        runs = [event.starts for event in history.events if isinstance(event, Starts)]
        keys = sorted({(start.ranks, start.which) for starts in runs for start in starts})
        self.groups = {key: dist.new_group([*key[0]], **UNSORTED) for key in keys if key != (everyone, 0)}
        self.under_way: list[tuple[Start, Call, Any]] = []
        self.waited: list[tuple[Start, Call, Any]] = []
        self.dropped: list[Call] = []
        self.order: list[str] = []
        self.wrong: list[str] = []

    def play(self, event: Starts | WaitForAll) -> None:
        self.draw = random.Random(1000 * event.seed + self.rank)
        if isinstance(event, WaitForAll):
            while self.under_way:
                self._wait()
                if self.draw.random() < 0.3:
                    self._wait_again()
            for start, call, _ in self.waited:
                self._look(start, call, "in the end")
            return
        runs = [self._in_own_order(event.starts)] if event.at_once else [[start] for start in event.starts]
        for run in runs:
            for start in run:
                if self.rank in start.ranks:
                    self._start(start)
            patience = 0.35 if len(self.under_way) < 8 else 0.02
            while self.under_way and self.draw.random() < patience:
                self._wait()
            while self.waited and self.draw.random() < 0.25:
                self._wait_again()

    def problem(self) -> str:
        return self.wrong[0] if self.wrong else ""

    def _in_own_order(self, run: Sequence[Start]) -> list[Start]:
        """Shuffle the starts, but keep the order within each group."""
        of_group: dict[Any, list[Start]] = {}
        for start in run:
            of_group.setdefault((start.ranks, start.which), []).append(start)
        left, found = [*of_group.values()], []
        while left := [each for each in left if each]:
            found.append(self.draw.choice(left).pop(0))
        return found

    def _start(self, start: Start) -> None:
        group = self.groups.get((start.ranks, start.which))
        numbers = small_integers(start.dtype, start.number)
        call = Call(start.name, numbers, start.elements, self.device, group=group, **start.options)
        self.order.append(f"start {start.number}")
        handle = call.start(self.target, start.async_op)
        if start.async_op and self.draw.random() < 0.1:
            self.order.append(f"drop {start.number}")  # a rank that needs no result waits for none
            self.dropped.append(call)  # its tensors stay, as until a wait
        elif start.async_op:
            self.under_way.append((start, call, handle))
        else:
            self._look(start, call, "as it returned")
            self.waited.append((start, call, _Returned()))

    def _look(self, start: Start, call: Call, when: str) -> None:
        after = f" (on this rank: {', '.join(self.order[-40:])})"
        for line in call.wrong():
            claim, _, found = line.replace("; found", "\nfound").partition("\n")
            self.wrong.append(f"collective {start.number}, {when}: {claim}{after}\n{found}")

    def _wait(self) -> None:
        start, call, handle = self.under_way.pop(self.draw.randrange(len(self.under_way)))
        _wait_patiently(
            handle, f"{start}, which every rank of the group has started or will, after {', '.join(self.order)}"
        )
        self.order.append(f"wait {start.number}")
        self._look(start, call, "as wait() returned")
        self.waited.append((start, call, handle))

    def _wait_again(self) -> None:
        start, call, handle = self.draw.choice(self.waited)
        if self.draw.random() < 0.5:
            handle.wait()
            self.order.append(f"wait {start.number} again")
            self._look(start, call, "as a second wait() returned")
            return
        result, kept = call.tensors[0], call.tensors[0].clone()
        result.copy_(largest(result.dtype))  # the caller may write to it
        written = call.tensors[0].clone()
        handle.wait()
        self.order.append(f"wait {start.number} again")
        if not torch.equal(result, written) and not torch.equal(result, kept):  # Gloo's reduce-scatter writes it again
            self.wrong.append(
                f"a second wait() changes what the caller has written to the output since: {call} ({start})"
            )
        result.copy_(kept)


def _wait_patiently(handle: Any, what: str) -> None:
    """Wait in another thread, to report what hangs."""
    if torch.cuda.is_available():  # later work on this thread's stream must come after the wait
        handle.wait()
        return
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            handle.wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        raise TimeoutError(f"wait() did not return in {PATIENCE:.0f} s: it was for {what}")
    if raised:
        raise raised[0]


def start_waits(implementation: Implementation, token: str, device: str) -> bool:
    """Return True if any start blocks until other ranks start, which is allowed: rank 0 starts first, then the
    others."""
    store, rank, waited = dist.distributed_c10d._get_default_store(), dist.get_rank(), False
    for name in COLLECTIVES:
        said = f"{token} {name}"
        if rank > 0 and not wait_until(lambda said=said: store.check([said]), seconds=0.5):
            waited = True
        handle = Call(name, small_integers(torch.float32), 97, device).start(implementation.watched, async_op=True)
        if rank == 0:
            store.set(said, "started")
        handle.wait()
    return waited


class _Returned:
    """Stands for the handle of a synchronous collective."""

    def wait(self) -> None:
        return None


@pytest.mark.examples(2, 12, 30)
def test_any_history_of_collectives(implementation: Implementation, world: World, examples: int, device: str) -> None:
    # NCCL may hang where ranks start collectives of several groups in different orders.
    mixed = device == "cpu" and not any(world.run(start_waits, implementation, uuid4().hex, device))
    hold_on_ranks(world, histories(world.size, mixed), Waiting, implementation, device, examples)


MANY = 40
"""Collectives under way in each group: more than the 32 threads that Python's pools have at most by default."""


def many_in_two_groups(implementation: Implementation, device: str) -> list[str]:
    """Start many in each of two groups, on odd ranks first those of the second."""
    groups = [dist.new_group(), dist.new_group()]
    calls = [
        Call(COLLECTIVES[i % 3], small_integers(torch.float32, i), 5, device, group=groups[i // MANY])
        for i in range(2 * MANY)
    ]
    order = calls[MANY:] + calls[:MANY] if dist.get_rank() % 2 else calls
    for call, handle in [(call, call.start(implementation.watched, async_op=True)) for call in order]:
        _wait_patiently(handle, f"{call}, of {MANY} in each of two groups, that ranks started in different orders")
    return [line for call in calls for line in call.wrong()]


def test_however_many_are_under_way_groups_do_not_wait_for_each_other(
    implementation: Implementation, world: World, device: str
) -> None:
    if device != "cpu" or any(world.run(start_waits, implementation, uuid4().hex, device)):
        pytest.skip("a start may wait for other ranks, and these may then start in one order alone")
    assert_nothing_wrong(world.run(many_in_two_groups, implementation, device))

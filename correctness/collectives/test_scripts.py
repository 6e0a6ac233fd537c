"""Random scripts of collectives: started in several groups, waited for in each rank's own order, and again."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from correctness.collectives.summing import Call, assert_right, largest, small_integers
from correctness.support.waiting import wait_until
from impl.collectives.cases import COLLECTIVES
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("collectives")

PATIENCE = 20.0
"""Seconds that a wait may take, which is less than a world's deadline: what hangs is then told in one line."""


@dataclass(frozen=True)
class Start:
    """One collective of a script, in a group of these ranks: the `which`-th that has them."""

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


def drawn(draw: random.Random, ranks: int, mixed: bool) -> list[list[Start]]:
    """Runs of starts. Within a run that has several, each rank starts those of different groups in its own order."""
    order, everyone = draw.sample(range(ranks), ranks), tuple(range(ranks))
    cut = draw.randint(1, ranks)
    groups = [(everyone, 0), (everyone, 1)]
    groups += [(tuple(sorted(part)), 0) for part in (order[:cut], order[cut:]) if part and len(part) < ranks]
    runs: list[list[Start]] = []
    number = 0
    for _ in range(9):
        kind = draw.choice(["one"] * 6 + ["many alike"] + ["mixed"] * 2 * mixed)
        count = {"one": 1, "mixed": draw.randint(2, 8), "many alike": draw.choice([9, 17, 33, 65, 140])}[kind]
        alike = None
        runs.append([])
        for _ in range(count):
            number += 1
            one = _drawn_start(draw, number, groups, kind != "one" or draw.random() < 0.75)
            if kind == "many alike":  # as with a number of buffers that are taken in turn
                alike = alike or replace(one, elements=min(one.elements, 97))
                one = replace(alike, number=number)
            runs[-1].append(one)
        if kind == "many alike":
            runs[-1:] = [[one] for one in runs[-1]]
    return runs


def _drawn_start(draw: random.Random, number: int, groups: list[tuple[tuple[int, ...], int]], async_op: bool) -> Start:
    name = draw.choice(COLLECTIVES)
    gaps = [draw.choice([0, 1, 3, 16]) for _ in range(2 if name == "all_reduce" else 3)]
    options = [{}, {"gaps": gaps}, {"gaps": gaps, "swapped": True}, {"in_place": name != "all_reduce"}]
    size = draw.choice([0, 1, 1, 5, 97, 97, 1000, 1000, 300_007])
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]
    ranks, which = draw.choice(groups)
    return Start(number, name, size, draw.choice(dtypes), draw.choice(options), async_op, ranks, which)


class Script:
    """A script on this rank, which draws its own waits between the starts."""

    def __init__(self, implementation: Implementation, seed: int, mixed: bool, device: str) -> None:
        self.target, self.device = implementation.adapted, device
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.draw, common = random.Random(1000 * seed + rank), random.Random(seed)
        self.runs = drawn(common, ranks, mixed)
        keys = sorted({(start.ranks, start.which) for run in self.runs for start in run})
        self.groups = {key: dist.new_group([*key[0]]) for key in keys if key != (tuple(range(ranks)), 0)}
        self.rank = rank
        self.under_way: list[tuple[Start, Call, Any]] = []
        self.waited: list[tuple[Start, Call, Any]] = []
        self.order: list[str] = []
        self.wrong: list[str] = []

    def play(self) -> list[str]:
        """What is wrong on this rank."""
        for run in self.runs:
            together = len(run) > 1
            for start in self._in_own_order(run) if together else run:
                if self.rank in start.ranks:
                    self._start(start)
            patience = 0.35 if len(self.under_way) < 8 else 0.02
            while self.under_way and self.draw.random() < patience:
                self._wait()
            while self.waited and self.draw.random() < 0.25:
                self._wait_again()
        while self.under_way:
            self._wait()
            if self.draw.random() < 0.3:
                self._wait_again()
        for start, call, _ in self.waited:
            self._look(start, call, "in the end")
        return self.wrong

    def _in_own_order(self, run: list[Start]) -> list[Start]:
        """The order in each group stays."""
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
        if start.async_op:
            self.under_way.append((start, call, handle))
        else:
            self._look(start, call, "as it returned")
            self.waited.append((start, call, _Returned()))

    def _look(self, start: Start, call: Call, when: str) -> None:
        after = f" after {', '.join(self.order[-40:])}" if self.order else ""
        self.wrong.extend(f"{when}: {line} ({start}{after})" for line in call.wrong())

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
        result.copy_(largest(result.dtype))  # the caller's own to write to
        written = call.tensors[0].clone()
        handle.wait()
        self.order.append(f"wait {start.number} again")
        if not torch.equal(result, written) and not torch.equal(result, kept):  # Gloo's reduce-scatter writes it again
            self.wrong.append(
                f"a second wait() changes what the caller has written to the output since: {call} ({start})"
            )
        result.copy_(kept)


def _wait_patiently(handle: Any, what: str) -> None:
    """Wait in another thread, to say what hangs."""
    if torch.cuda.is_available():  # what follows on this thread's stream comes after the wait
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
    """Whether any start waits for the other ranks' starts, as it may: the first rank starts, and then the others."""
    store, rank, waited = dist.distributed_c10d._get_default_store(), dist.get_rank(), False
    for name in COLLECTIVES:
        said = f"{token} {name}"
        if rank > 0 and not wait_until(lambda said=said: store.check([said]), seconds=0.5):
            waited = True
        handle = Call(name, small_integers(torch.float32), 97, device).start(implementation.adapted, async_op=True)
        if rank == 0:
            store.set(said, "started")
        handle.wait()
    return waited


def play(implementation: Implementation, seed: int, mixed: bool, device: str) -> list[str]:
    return Script(implementation, seed, mixed, device).play()


class _Returned:
    """Stands for the handle of a collective that was not asynchronous."""

    def wait(self) -> None:
        return None


@pytest.mark.examples(2, 12, 30)
def test_random_scripts_of_collectives(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    # NCCL's may hang where ranks start those of several groups in another order.
    mixed = device == "cpu" and not any(world.run(start_waits, implementation, uuid4().hex, device))
    for seed in torch.randint(2**31, (examples,)).tolist():
        assert_right(world.run(play, implementation, seed, mixed, device))

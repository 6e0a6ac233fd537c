"""Random programs of what a user may do with a sharded model, against the same program on an unsharded one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.utils._pytree import tree_map

from correctness.support.fully_sharded import (
    Deep,
    Odd,
    SGDs,
    as_expected,
    assert_none,
    contains,
    full,
    make,
    own_batch,
    parameters_of,
    wrap,
)
from correctness.support.whole_batch import UsedTwice, batch, loss
from impl.fsdp import by_type
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("fsdp")

LINEARS = by_type(nn.Linear)
KINDS = (Odd, Deep, UsedTwice)
LENGTHS = (6, 8, 10, 12, 14, 16, 20, 24)
"""Events of each program in turn: the short ones come first, because they say more when they fail."""


class Program:
    """A sharded and an unsharded model of the same weights; each event is done to both. It returns what is wrong."""

    def __init__(self, implementation: Implementation, draw: random.Random, device: str) -> None:
        kind, self.draw, self.device = draw.choice(KINDS), draw, device
        self.plain = make(kind, 0, device)
        keep = draw.random() < 0.3
        self.model = wrap(implementation, make(kind, 0, device), wrap=LINEARS)
        self.of_torch = contains(self.model, FSDPModule) or contains(self.model, FSDP1)
        if keep and not self.of_torch:
            options = {"reshard_after_forward": False, "wrap": LINEARS}
            self.model = wrap(implementation, make(kind, 0, device), **options)
        self.optimizers = SGDs(self.model, self.plain)
        self.open: list[tuple[Tensor, Tensor]] = []  # losses whose backward may still come
        self.unsynchronized, self.step_number = False, 0
        self.used = False  # a call that was no backward's came since the last backward
        self.saved = self._state()
        unused = () if self.of_torch else (self.forward,)  # a forward that no backward follows
        self.ending = (self.forward, self.backward, self.finish, *unused, self.step, self.evaluate, self.gather)

    def _state(self) -> Any:
        if not hasattr(self.model, "state_dict"):
            return None
        states = self.model.state_dict(), self.plain.state_dict()
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, states)

    def possible(self) -> list[Callable[[], str | None]]:
        """What may come next. PyTorch's FSDP keeps what a call gathered until the next backward, so there one must come
        before the weights change; and it takes one forward at a time.
        """
        events: list[Callable[[], str | None]] = [self.evaluate]
        if len(self.open) < (1 if self.of_torch else 2):
            events += 2 * [self.forward]
        if self.open:
            events += 3 * [self.backward]
        if not (self.of_torch and (self.open or self.used)):
            events += [self.gather]
            if not self.unsynchronized:
                events += [self.step, self.step, self.clear_gradients]
                events += [self.save, self.load] if self.saved is not None else []
                events += (
                    [self.clip] if hasattr(self.model, "clip_grad_norm_") and not contains(self.model, FSDP1) else []
                )
        if self.unsynchronized:
            events += 2 * [self.finish]
        return events

    def forward(self) -> None:
        if self.of_torch and self.open:
            self.backward()
        self.used = True
        self.step_number += 1
        whole = batch(self.step_number, dist.get_world_size(), self.device)
        mine = own_batch(self.step_number, self.device)
        self.open.append((loss(self.model, *mine), loss(self.plain, *whole)))

    def backward(self) -> None:
        for each in self.open.pop(self.draw.randrange(len(self.open))):
            each.backward()
        self.unsynchronized, self.used = True, False

    def finish(self) -> None:
        self.model.finish_gradient_synchronization()
        self.unsynchronized = False

    def step(self) -> None:
        self.optimizers.step()
        self.open.clear()  # autograd takes no backward of a forward with other weights

    def clear_gradients(self) -> None:
        self.optimizers.zero_grad()

    def clip(self) -> str:
        if all(p.grad is None for p in self.plain.parameters()):
            return ""
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
        norm = self.model.clip_grad_norm_(0.1)
        return as_expected("the returned", {"norm": norm.cpu()}, {"norm": expected.cpu()}, tolerance=1e-9)

    def save(self) -> None:
        self.saved = self._state()

    def load(self) -> None:
        mine, plains = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.saved)
        self.model.load_state_dict(mine)
        self.plain.load_state_dict(plains)
        self.open.clear()

    def evaluate(self) -> str:
        self.used = True
        x, _ = batch(99, dist.get_world_size(), self.device)
        with torch.no_grad():
            return as_expected("the", {"output": self.model(x)}, {"output": self.plain(x)}, tolerance=1e-9)

    def gather(self) -> str:
        return as_expected("the gathered", full(self.model), parameters_of(self.plain), tolerance=1e-9)


def play_on_rank(implementation: Implementation, seed: int, device: str) -> str:
    """All ranks draw the same programs."""
    for number, length in enumerate(LENGTHS):
        program = Program(implementation, random.Random(f"{seed} {number}"), device)
        done: list[str] = []
        for i in range(length + len(program.ending)):
            event = program.draw.choice(program.possible()) if i < length else program.ending[i - length]
            done.append(event.__name__)
            try:
                problem = event()
            except RuntimeError as error:  # such as one about full parameters that are freed
                problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if problem:
                return f"after {', '.join(done[:-1])}: {done[-1]}: {problem}"
    return ""


@pytest.mark.examples(1, 4, 40)
def test_programs_do_what_they_do_to_an_unsharded_model(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    """The run's --seed draws the same programs again."""
    for _ in range(examples):
        assert_none(world.run(play_on_rank, implementation, int(torch.randint(2**20, ())), device))

"""Random programs of backward passes and `no_sync`, on two wrappers at once, against a counter of its depth."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from correctness.support.averaging import Products, assert_nothing_wrong, backward, values, wrap
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("data_parallel")

LIKE = [torch.empty(4, 3), torch.empty(5), torch.empty(7)]
DEPTH = 2


class ExpectedError(Exception):
    """Raised by a test, to leave `no_sync`."""


class Counted:
    """A wrapper, and what its gradients must be: `shared` passes were averaged, this rank's `own` were not."""

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device = model, device
        self.contexts: list[AbstractContextManager[None]] = []
        self.shared: list[int] = []
        self.own: list[int] = []
        self.backward_outside = False

    def possible(self) -> list[str]:
        """What a program may do next: what is outside of `no_sync` goes on with `finish`."""
        if self.backward_outside:
            return ["finish"]
        inside = ["exit", "exit by an error", "finish"] if self.contexts else []
        return [*inside, "backward", "backward", *["enter"] * (len(self.contexts) < DEPTH), *["zero"] * (not inside)]

    def do(self, action: str, step: int) -> None:
        if action == "enter":
            self.contexts.append(self.model.no_sync())
            self.contexts[-1].__enter__()
        elif action == "exit":
            self.contexts.pop().__exit__(None, None, None)
        elif action == "exit by an error":
            error = ExpectedError()
            assert not self.contexts.pop().__exit__(ExpectedError, error, None), "no_sync() swallows an error"
        elif action == "zero":
            self.model.module.zero_grad()
            self.shared, self.own = [], []
        elif action == "backward":
            backward(self.model, values(dist.get_rank(), *LIKE, step=step), self.device)
            self.own.append(step)
            self.backward_outside = not self.contexts
        else:
            self.model.finish_gradient_synchronization()
            if not self.contexts:
                self.shared, self.own, self.backward_outside = self.shared + self.own, [], False

    def wrong(self, when: str) -> list[str]:
        """What is wrong with the gradients, where they are known: not between backward and `finish`."""
        if self.backward_outside or not self.shared + self.own:
            return []
        ranks = [*range(dist.get_world_size())]
        shared = [x / len(ranks) for x in _summed(ranks, self.shared)]
        expected = [a + b for a, b in zip(shared, _summed([dist.get_rank()], self.own), strict=True)]
        what = "the average and what this rank added in no_sync() since" if self.own else "the average"
        return [
            f"{when}: the gradient of {name!r} is not {what}: "
            f"found {None if p.grad is None else p.grad.flatten()[:3].tolist()}, expected {x.flatten()[:3].tolist()}"
            for (name, p), x in zip(self.model.module.named_parameters(), expected, strict=True)
            if p.grad is None or not torch.allclose(p.grad.cpu(), x, rtol=1e-5, atol=1e-5)
        ]


def _summed(ranks: list[int], steps: list[int]) -> list[Tensor]:
    total = [torch.zeros_like(x) for x in LIKE]
    for rank in ranks:
        for step in steps:
            total = [a + b for a, b in zip(total, values(rank, *LIKE, step=step), strict=True)]
    return total


def play(implementation: Implementation, seed: int, device: str) -> list[str]:
    """What is wrong after any action with the gradients of either wrapper; all ranks play the same program."""
    draw, said = random.Random(seed), []
    wrappers = [
        Counted(wrap(implementation, Products(*map(torch.zeros_like, LIKE)).to(device)), device) for _ in range(2)
    ]
    for step in range(24):
        which = draw.randrange(2)
        action = draw.choice(wrappers[which].possible())
        wrappers[which].do(action, step)
        said.append(f"{'AB'[which]} {action}")
        for name, each in zip("AB", wrappers, strict=True):
            if wrong := each.wrong(f"wrapper {name} after the program {', '.join(said)}"):
                return wrong
    return []


@pytest.mark.examples(8, 24, 80)
def test_random_programs_of_no_sync_on_two_wrappers(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    for seed in torch.randint(2**31, (examples,)).tolist():
        assert_nothing_wrong(world.run(play, implementation, seed, device))

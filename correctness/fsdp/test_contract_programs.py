"""Random programs of what a user may do with a sharded model, against the same program on an unsharded one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from correctness.fsdp.checks import SGDs, as_expected, assert_none, contains, full, parameters_of, wrap
from correctness.fsdp.random_models import Rows, random_plan
from impl.fsdp import norms_and_biases
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")

LENGTHS = (6, 8, 10, 12, 14, 16, 20, 24)
"""Events of each program in turn: the short ones come first, because they say more when they fail."""
OPTIONS = ({}, {}, {"compute_dtype": torch.float32}, {"reduce_dtype": torch.float32})


def trial(implementation: Implementation, group: dist.ProcessGroup | None, device: str) -> tuple[bool, tuple[str, ...]]:
    """Whether it is made of PyTorch's FSDP, which has limits of its own, and the layers that it cannot take."""
    model = wrap(implementation, nn.Linear(2, 2).to(device), process_group=group)
    of_torch = contains(model, FSDPModule) or contains(model, FSDP1)
    if of_torch:
        return True, ("some rows", "tied")
    # DTensors are reduced one by one, so every rank must have each gradient.
    return False, ("some rows",) if any(isinstance(p, DTensor) for p in model.parameters()) else ()


class Program:
    """A sharded and an unsharded model of the same weights; each event is done to both. It returns what is wrong."""

    def __init__(
        self, implementation: Implementation, draw: random.Random, group: dist.ProcessGroup | None, device: str
    ) -> None:
        self.draw, self.group, self.device = draw, group, device
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.of_torch, without = trial(implementation, group, device)
        self.plan = random_plan(draw, without)
        options = dict(draw.choice(OPTIONS))
        self.tolerance = 1e-3 if options else 1e-9
        if draw.random() < 0.3 and not self.of_torch:
            options["reshard_after_forward"] = False
        if draw.random() < 0.3:
            options["ignored_params"] = norms_and_biases
        seeds = [dist.get_global_rank(group, i) if group else i for i in range(self.ranks)]
        self.plain = self.plan.make(seeds[0], device)
        module = self.plan.make(seeds[self.rank], device)
        self.model = wrap(implementation, module, process_group=group, wrap=self.plan.wrap, **options)
        self.optimizers = SGDs(self.model, self.plain)
        self.open: list[tuple[Rows, Tensor, Rows, Tensor]] = []  # losses whose backward may still come
        self.unsynchronized, self.step_number = False, 0
        self.used = False  # a call that was no backward's came since the last backward
        self.saved = self._state()
        unused = () if self.of_torch else (self.forward,)  # a forward that no backward follows
        self.ending = (self.forward, self.backward, self.finish, *unused, self.step, self.evaluate, self.gather)

    def starts_right(self) -> str:
        """The parameters are the first rank's to the bit, whatever they are computed in."""
        return as_expected("at the start, the", full(self.model), parameters_of(self.plain), 0) or self.buffers()

    def buffers(self) -> str:
        """Forward changed them as it does without wrapper, in their own dtypes."""
        names = [name for name, _ in self.plain.named_buffers()]
        found, expected = (
            dict(zip(names, module.buffers(), strict=True)) for module in (self.model.module, self.plain)
        )
        for name in names:
            if found[name].dtype != expected[name].dtype:
                return f"the buffer {name} is of {found[name].dtype}, expected {expected[name].dtype}"
        return as_expected("the buffer", found, expected)

    def _state(self) -> Any:
        if not hasattr(self.model, "state_dict"):
            return None
        states = self.model.state_dict(), self.plain.state_dict()
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, states)

    def possible(self) -> list[Callable[[], str | None]]:
        """What may come next. PyTorch's FSDP keeps what a call gathered until the next backward, so there one must come
        before the weights change; and it takes one forward at a time.
        """
        events: list[Callable[[], str | None]] = [self.evaluate, self.switch_mode]
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
        every = Rows.of(self.step_number, self.ranks, self.device)
        mine = every.share(self.rank)
        inputs = {name for name in ("x", "shift") if self.draw.random() < 0.5}
        sides = {i for i in range(8) if self.draw.random() < 0.5}
        for rows in (mine, every):
            rows.require_gradients(inputs)
        self.open.append((mine, mine.loss(self.model, sides), every, every.loss(self.plain, sides)))

    def backward(self) -> str:
        mine, own, every, whole = self.open.pop(self.draw.randrange(len(self.open)))
        own.backward()
        whole.backward()
        self.unsynchronized, self.used = True, False
        share = slice(self.rank * len(mine.x), (self.rank + 1) * len(mine.x))
        for name in ("x", "shift"):
            found, expected = getattr(mine, name).grad, getattr(every, name).grad
            if expected is None:
                continue
            if found is None:
                return f"the input {name} has no gradient"
            wanted = {name: self.ranks * expected[share]}
            if problem := as_expected("the gradient of the input", {name: found}, wanted, self.tolerance):
                return problem
        return ""

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
        return as_expected("the returned", {"norm": norm.cpu()}, {"norm": expected.cpu()}, self.tolerance)

    def save(self) -> None:
        self.saved = self._state()

    def load(self) -> None:
        mine, plains = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.saved)
        self.model.load_state_dict(mine)
        self.plain.load_state_dict(plains)
        self.open.clear()

    def switch_mode(self) -> None:
        training = not self.plain.training
        self.plain.train(training)
        self.model.module.train(training)

    def evaluate(self) -> str:
        self.used = True
        rows = Rows.of(99, self.ranks, self.device)
        with torch.no_grad():
            found, expected = (rows.loss(model, {0, 1}) for model in (self.model, self.plain))
        return as_expected("without gradients, the", {"loss": found}, {"loss": expected}, self.tolerance)

    def gather(self) -> str:
        return as_expected("the gathered", full(self.model), parameters_of(self.plain), self.tolerance)


def play_on_rank(implementation: Implementation, seed: int, device: str) -> str:
    """All ranks draw the same programs; every third is played by even and odd ranks, in process groups of their own.

    What is wrong is told at the end of its program, so that other ranks need not wait for this one.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    sides = _sides(size)
    for number, length in enumerate(LENGTHS):
        group = sides[rank % 2] if number % 3 == 2 else None
        program = Program(implementation, random.Random(f"{seed} {number}"), group, device)
        problem = play(program, length)
        wrong = torch.tensor(bool(problem)).int()
        dist.all_reduce(wrong)  # also: a rank that leaves a group while others still connect to it breaks that
        if wrong:
            return problem
    return ""


@cache
def _sides(size: int) -> list[dist.ProcessGroup]:
    """Even and odd ranks; for good, as PyTorch's wrappers keep the meshes that they have made of groups."""
    return [dist.new_group([*range(first, size, 2)]) for first in range(min(size, 2))]


def play(program: Program, length: int) -> str:
    """The first problem, once all is played."""
    problem, done = program.starts_right(), ["wrapping"]
    first = f"{problem}; {program.plan}" if problem else ""
    for i in range(length + len(program.ending)):
        event = program.draw.choice(program.possible()) if i < length else program.ending[i - length]
        problem = event() or program.buffers()
        if problem and not first:
            first = f"after {', '.join(done)}: {event.__name__}: {problem}; {program.plan}"
        done.append(event.__name__)
    return first


@pytest.mark.large
@pytest.mark.examples(1, 4, 40)
def test_programs_do_what_they_do_to_an_unsharded_model(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    """The run's --seed draws the same programs again."""
    for _ in range(examples):
        assert_none(world.run(play_on_rank, implementation, int(torch.randint(2**20, ())), device))

"""Random scripts of collectives: started, waited for in each rank's own order, and waited for again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from correctness.support.summing import Call, assert_right, largest, small_integers
from impl.collectives.cases import COLLECTIVES
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("collectives")


@dataclass(frozen=True)
class Start:
    """One collective of a script. `alone`: in a group of this rank only."""

    name: str
    elements: int
    dtype: torch.dtype
    options: dict[str, Any]
    async_op: bool
    alone: bool

    def __str__(self) -> str:
        how = [f"{option}={value}" for option, value in self.options.items()]
        how += ["async_op=True"] * self.async_op + ["in a group of one rank"] * self.alone
        return ", ".join([self.name, f"{self.elements} elements", *how])


def drawn(seed: int) -> list[Start]:
    draw = random.Random(seed)
    sizes, dtypes = [0, 1, 5, 97, 1000], [torch.float32, torch.float64, torch.int64]
    starts = []
    for _ in range(14):
        name = draw.choice(COLLECTIVES)
        gaps = [draw.choice([0, 1, 3, 16]) for _ in range(2 if name == "all_reduce" else 3)]
        options = [{}, {"gaps": gaps}, {"gaps": gaps, "swapped": True}, {"in_place": name != "all_reduce"}]
        size = draw.choice(sizes)
        alone, async_op = draw.random() < 0.15, draw.random() < 0.75
        starts.append(Start(name, size, draw.choice(dtypes), draw.choice(options), async_op, alone))
    return starts


def play(implementation: Implementation, seed: int, device: str) -> list[str]:
    """What is wrong on this rank. All ranks start the same; each draws its own waits between the starts."""
    target, rank, wrong = implementation.adapted, dist.get_rank(), []
    draw = random.Random(1000 * seed + rank)
    own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    under_way: list[tuple[int, Call, Any]] = []
    waited: list[tuple[int, Call, Any]] = []
    order: list[str] = []

    def look(i: int, call: Call, when: str) -> None:
        after = f" after the waits {', '.join(order)}" if order else ""
        wrong.extend(f"{when}{after}: {line} (collective {i}: {starts[i - 1]})" for line in call.wrong())

    def wait() -> None:
        entry = under_way.pop(draw.randrange(len(under_way)))
        i, call, handle = entry
        handle.wait()
        order.append(str(i))
        look(i, call, "as wait() returned")
        waited.append(entry)

    def wait_again() -> None:
        i, call, handle = draw.choice(waited)
        if draw.random() < 0.5:
            handle.wait()
            order.append(f"{i} again")
            look(i, call, "as a second wait() returned")
            return
        result, kept = call.tensors[0], call.tensors[0].clone()
        result.copy_(largest(result.dtype))  # the caller's own to write to
        written = call.tensors[0].clone()
        handle.wait()
        order.append(f"{i} again")
        if not torch.equal(result, written) and not torch.equal(result, kept):  # Gloo's reduce-scatter writes it again
            wrong.append(
                f"a second wait() changes what the caller has written to the output since: {call} "
                f"(collective {i}: {starts[i - 1]})"
            )
        result.copy_(kept)

    starts = drawn(seed)
    for i, each in enumerate(starts, 1):
        group = own if each.alone else None
        call = Call(each.name, small_integers(each.dtype, i), each.elements, device, group=group, **each.options)
        handle = call.start(target, each.async_op)
        if each.async_op:
            under_way.append((i, call, handle))
        else:
            look(i, call, "as it returned")
            waited.append((i, call, _Returned()))
        while under_way and draw.random() < 0.35:
            wait()
        while waited and draw.random() < 0.25:
            wait_again()
    while under_way:
        wait()
        wait_again()
    for i, call, _ in waited:
        look(i, call, "in the end")
    return wrong


class _Returned:
    """Stands for the handle of a collective that was not asynchronous."""

    def wait(self) -> None:
        return None


@pytest.mark.examples(6, 18, 60)
def test_random_scripts_of_collectives(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    for seed in torch.randint(2**31, (examples,)).tolist():
        assert_right(world.run(play, implementation, seed, device))

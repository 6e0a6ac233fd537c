"""Collectives unwatched, on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> list[Tensor]:
    sizes = torch.randint(1, 5000, (12,), generator=generator).tolist()
    return [torch.randn(2, 2 * size, generator=generator) for size in sizes]


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    needs_one = isinstance(target, type) and not isinstance(vars(target).get("all_reduce"), (staticmethod, classmethod))
    collectives, found = target() if needs_one else target, {}
    for again in range(15):
        for number, both in enumerate(given):
            total, part = both[rank].clone(), torch.empty(both.shape[1] // 2)
            gathered = torch.empty(2 * both.shape[1])
            handles = [collectives.all_reduce(total, async_op=True)]
            handles += [collectives.reduce_scatter(part, both[rank].clone(), async_op=True)]
            handles += [collectives.all_gather(gathered, both[rank].clone(), async_op=True)]
            for handle in handles:
                handle.wait()
            parts = [torch.empty_like(part), torch.empty_like(part)]
            torch.distributed.all_gather(parts, part)
            if again in (0, 14):
                names = [f"{name} of call {number}" for name in ("all_reduce", "reduce_scatter", "all_gather")]
                found |= dict(zip(names, (total, torch.cat(parts), gathered), strict=True))
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    found = {}
    for number, both in enumerate(given):
        found |= {f"{name} of call {number}": both.sum(0) for name in ("all_reduce", "reduce_scatter")}
        found[f"all_gather of call {number}"] = both.flatten()
    return found


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("collectives")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)

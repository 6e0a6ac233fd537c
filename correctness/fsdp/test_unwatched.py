"""Full sharding unwatched, on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from correctness.support.whole_batch import WholeBatch
from correctness.support.whole_batch import draw_rows_of_two_ranks as draw
from shardmark.api import Implementation


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    torch.manual_seed(7 + rank)
    dim = given["dim"]
    model = target(torch.nn.Sequential(torch.nn.Linear(dim, 3 * dim), torch.nn.Tanh(), torch.nn.Linear(3 * dim, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for step in range(30):
        optimizer.zero_grad()
        model(given["x"][rank]).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        if step in (0, 29):
            full = model.gather_full_parameters()
            found |= {f"{name} after step {step}": p.detach().clone() for name, p in full.items()}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(lambda module: WholeBatch(module, given["x"]), given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("fsdp")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)

"""A data-parallel wrapper unwatched, on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from correctness.support.whole_batch import WholeBatch
from correctness.support.whole_batch import draw_rows_of_two_ranks as draw
from shardmark.api import Implementation


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        dim = given["dim"]
        return torch.nn.Sequential(torch.nn.Linear(dim, 3 * dim), torch.nn.Tanh(), torch.nn.Linear(3 * dim, 2))

    module, found = make(7 + rank), {}
    model = target(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        model(given["x"][rank]).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        if step in (0, 29):
            found |= {f"{name} after step {step}": p.detach().clone() for name, p in module.named_parameters()}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(lambda module: WholeBatch(module, given["x"]), given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("data_parallel")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)

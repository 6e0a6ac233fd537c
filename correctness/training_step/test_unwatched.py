"""A training step unwatched."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    batch, context, vocab = (5 + torch.randint(30, (3,), generator=generator)).tolist()
    tokens = torch.randint(vocab, (8, batch, context), generator=generator)
    targets = torch.randint(vocab, (8, batch, context), generator=generator)
    targets[:, 1::3, 2::5] = -100
    return {"vocab": vocab, "tokens": tokens, "targets": targets}


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    from impl.precision import Precision

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Embedding(given["vocab"], 12), torch.nn.Tanh(), torch.nn.Linear(12, given["vocab"])
    )
    step = target(model, torch.optim.SGD(model.parameters(), lr=0.5), precision=Precision())
    found = {}
    for number in range(40):
        model.zero_grad()
        loss = step(given["tokens"][number % 8], given["targets"][number % 8])
        if number in (0, 39):
            found |= {f"the loss of step {number}": loss.detach()}
            found |= {f"{name} after step {number}": p.detach().clone() for name, p in model.named_parameters()}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    def plain(model: Any, optimizer: Any, precision: Any) -> Any:
        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return step

    return perform(plain, given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("training_step")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)

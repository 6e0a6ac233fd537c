"""Training on a mesh unwatched: two copies of a small decoder."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation

STEPS = 20


def draw(generator: torch.Generator) -> dict[str, Any]:
    rows, context = (4 + torch.randint(6, (2,), generator=generator)).tolist()
    found = {}
    for name in ("tokens", "targets"):
        found[name] = torch.randint(48, (STEPS, 2 * rows, context), generator=generator)
    found["targets"][:, 1::3, 2::5] = -100
    return found


def perform(target: Any, given: Any, rank: int | None) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    from impl.mesh import Decoder, DecoderSize, adapted

    def model() -> Decoder:
        torch.manual_seed(5)
        return Decoder(DecoderSize())

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    mesh = None if rank is None else init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    trainer, found = adapted(target)(model, optimizer, mesh, max_norm=1.0), {}
    for step in range(len(given["tokens"])):
        tokens, targets = (given[name][step] for name in ("tokens", "targets"))
        batch = tokens, torch.arange(tokens.shape[1]).expand_as(tokens), targets
        own = batch if rank is None else tuple(each.tensor_split(2)[rank] for each in batch)
        loss, norm = trainer.step([own])
        found |= {f"loss and norm of step {step}": torch.tensor([loss, norm])}
        if step in (0, len(given["tokens"]) - 1):
            found |= {f"{name} after step {step}": p.detach().clone() for name, p in trainer.full_parameters().items()}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    from impl.mesh import OneProcess

    return perform(OneProcess, given, None)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("mesh")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)

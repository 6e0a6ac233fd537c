"""Tensor parallelism unwatched, on two ranks: batches drawn anew, over some steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation

STEPS = 8


def draw(generator: torch.Generator) -> dict[str, Any]:
    rows, context = (3 + torch.randint(6, (2,), generator=generator)).tolist()
    found = {name: torch.randint(48, (STEPS, rows, context), generator=generator) for name in ("tokens", "targets")}
    found["targets"][:, 1::3, 2::5] = -100
    return found


def perform(target: Any, given: Any, rank: int | None) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    from impl.distributed import full
    from impl.mesh import Decoder, DecoderSize

    torch.manual_seed(5)
    model: Any = Decoder(DecoderSize(dim=48, heads=24, kv_heads=12))
    if rank is not None:
        model = target(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = {}
    for step in range(len(given["tokens"])):
        tokens, targets = (given[name][step] for name in ("tokens", "targets"))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if rank is None:
            logits = model(tokens, positions).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        else:
            loss = model(tokens, positions, targets)
        optimizer.zero_grad()
        (loss / targets.numel()).backward()
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    return found | {f"{name} at the end": full(p.detach()).clone() for name, p in model.named_parameters()}


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(None, given, None)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("tensor_parallel")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)

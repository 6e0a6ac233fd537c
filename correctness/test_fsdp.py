"""Every way to shard everything against one process that has the whole model and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from correctness.whole_batch import (
    MODULES,
    STEPS,
    adam,
    assert_equal_states,
    batch,
    loss,
    module,
    share,
    single_process,
)
from impl.fsdp import by_size, by_type, whole
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = pytest.mark.family("fsdp")

WRAPS = {"linears": by_type(nn.Linear), "by_size": by_size(100), "whole": whole}


def _wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    return implementation.adapted(module, **{k: v for k, v in options.items() if implementation.accepts(k)})


def full_state(model: Any, module: nn.Module) -> dict[str, Tensor]:
    """The whole state as the unwrapped `module` would have it, on the CPU; buffers as they are there."""
    full = dict(module.named_buffers()) | model.gather_full_parameters()
    return {name: full[name].cpu() for name in module.state_dict()}


def train_on_rank(
    implementation: Implementation, name: str, device: str, wrap: str, accumulate: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Each rank starts from its own weights, so that rank 0's must reach the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = _wrap(implementation, module(name, rank, device), wrap=WRAPS[wrap], **options)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (tensor[share(rank)] for tensor in batch(step, ranks, device))
        if accumulate:
            loss(model, x[:1], y[:1]).backward()
            if accumulate == "finish_each":
                model.finish_gradient_synchronization()
            x, y = x[1:], y[1:]
        loss(model, x, y).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return full_state(model, module(name, 0, device))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MODULES)
def test_parameters_equal_a_single_process_on_the_whole_batch(
    implementation: Implementation, world: World, name: str, wrap: str, device: str
) -> None:
    ranks = world.run(train_on_rank, implementation, name, device, wrap, "", {})
    assert_equal_states(ranks, single_process(name, world.size, device))

"""Random histories of two data-parallel wrappers: all events of the contract, against float64 gradients."""

from __future__ import annotations

import pytest
from torch import nn

from correctness.data_parallel.averaging import is_torchs, wrap
from correctness.data_parallel.events import OPTIONS, histories
from correctness.data_parallel.player import Both
from correctness.engine.histories import hold_on_ranks
from shardmark.api import Implementation
from shardmark.ranks.world import World


def holds_torchs(implementation: Implementation, device: str) -> bool:
    return is_torchs(wrap(implementation, nn.Linear(1, 1).to(device)))


@pytest.mark.family("data_parallel")
@pytest.mark.examples(2, 14, 30)
def test_any_history_averages_gradients(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    accepted = [name for name in OPTIONS if implementation.accepts(name)]
    torchs = any(world.run(holds_torchs, implementation, device))
    hold_on_ranks(world, histories(world.size, accepted, torchs), Both, implementation, device, examples)

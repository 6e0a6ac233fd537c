"""Random histories of two data-parallel wrappers: all events of the contract, against float64 gradients."""

from __future__ import annotations

import pytest
from torch import nn

from correctness.data_parallel.averaging import is_torchs, wrap
from correctness.data_parallel.events import OPTIONS, Limits, histories
from correctness.data_parallel.player import Both
from correctness.engine.histories_on_ranks import hold_on_ranks
from shardmark.api import Implementation
from shardmark.ranks.world import World


def holds_torchs(implementation: Implementation, device: str) -> bool:
    return is_torchs(wrap(implementation, nn.Linear(1, 1).to(device)))


def _hold(implementation: Implementation, world: World, examples: int, device: str, plain: bool) -> None:
    accepted = [name for name in OPTIONS if implementation.accepts(name)]
    limits = Limits(any(world.run(holds_torchs, implementation, device)), plain)
    hold_on_ranks(world, histories(world.size, accepted, limits), Both, implementation, device, examples)


@pytest.mark.family("data_parallel")
@pytest.mark.examples(1, 14, 20)
def test_any_history_averages_gradients(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    _hold(implementation, world, examples, device, plain=True)


@pytest.mark.should("any history averages gradients, with events that few users need")
@pytest.mark.family("data_parallel")
@pytest.mark.examples(2, 8, 30)
def test_any_history_of_odd_events_averages_gradients(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    _hold(implementation, world, examples, device, plain=False)

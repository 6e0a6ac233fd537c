"""Random histories of a sharded optimizer: groups, options, frozen parameters, closures and states in any order."""

from __future__ import annotations

import pytest

from correctness.engine.histories_on_ranks import hold_on_ranks
from correctness.sharded_optimizer.events import histories
from correctness.sharded_optimizer.player import Beside
from shardmark.api import Implementation
from shardmark.ranks.world import World


@pytest.mark.family("sharded_optimizer")
@pytest.mark.examples(12, 30, 300)
def test_any_history_is_as_without_sharding(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    known = implementation.spec == "zero_redundancy"  # which fails where that is asked alone
    hold_on_ranks(world, histories(zero_redundancy=known), Beside, implementation, device, examples)

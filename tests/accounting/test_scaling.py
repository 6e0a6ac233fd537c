"""Strong and weak scaling: each rank's batch, and the efficiency, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from impl.training_step.cases import ScalingCase
from shardmark.api.registry import Unsupported

STRONG, WEAK = (ScalingCase(kind, "tiny", batch=8, context=32) for kind in ("strong", "weak"))


def test_strong_scaling_keeps_the_whole_batch_and_weak_scaling_each_ranks() -> None:
    assert [STRONG.on(ranks).batch * ranks for ranks in (1, 2, 4, 8)] == [8, 8, 8, 8]
    assert [WEAK.on(ranks).batch for ranks in (1, 2, 4, 8)] == [8, 8, 8, 8]


def test_a_batch_that_the_ranks_cannot_share_is_one_line() -> None:
    with pytest.raises(Unsupported, match=r"^3 ranks cannot share a batch of 8 equally$"):
        STRONG.on(3)
    assert WEAK.on(3).batch == 8


def test_efficiency_is_one_where_ranks_cost_nothing() -> None:
    """Four ranks share one's work in a quarter of its time, or do four times the work in the same."""
    assert STRONG.efficiency(4, ratio=0.25) == WEAK.efficiency(4, ratio=1.0) == 1
    assert STRONG.efficiency(4, ratio=0.5) == WEAK.efficiency(4, ratio=2.0) == 0.5

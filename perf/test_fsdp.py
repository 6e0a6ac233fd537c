"""What does sharding everything save, and what does it cost?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from impl.accounting.fsdp import work
from impl.fsdp import by_type
from impl.model.layers import Block
from impl.model.mlp import MLPBlock
from perf.ranks import RankStep, language_model
from shardmark import cases
from shardmark.cases import FSDPCase, TrainingStepCase
from shardmark.measure import Measure
from shardmark.registry import Implementation
from shardmark.world import World

UNITS = by_type(Block, MLPBlock, nn.Embedding, nn.Linear)
"""A unit for each block, the embedding and the output projection; the final norm is the whole's own."""


class FSDPStep(RankStep):
    """Every rank has its part of parameters, gradients and moments."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The sharded model, and AdamW: fused, so that the optimizer itself needs no temporaries."""
        compute = getattr(torch, case.dtype) if case.dtype != "float32" else None
        units = {"wrap": UNITS} if implementation.accepts("wrap") else {}
        model = implementation.adapted(language_model(case), compute_dtype=compute, **units)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@pytest.mark.family("fsdp")
@pytest.mark.question("What does sharding everything save, and what does it cost?")
@pytest.mark.cases(cases.FSDP)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


@pytest.mark.family("fsdp", only=("sharded", "fsdp2"))
@pytest.mark.question("What does sharding everything save, and what does it cost?")
@pytest.mark.cases(cases.FSDP_LOW_PRECISION)
@pytest.mark.benchmark(min_rounds=9)
def test_low_precision_step(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


def _measure(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    case = replace(case, ranks=world.size)
    kept = implementation.name.endswith("kept")
    measure(FSDPStep, implementation, case, world_size=world.size, work=work(case, kept), slack=1.02)

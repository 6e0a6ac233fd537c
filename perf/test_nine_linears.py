"""What does FSDP save beside DDP? An MLP of nine square linears with bias and ReLU, plain SGD, a large batch.

Where a way of sharding has no formula of its own here, it is held to DDP's: a saving is what it is there for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from impl.accounting.nine_linears import FSDP_PEAKS, ddp_peak, work
from impl.model.mlp import square_linears
from shardmark import cases, registry
from shardmark.cases import NineLinearsCase
from shardmark.measure import Measure
from shardmark.memory import stage
from shardmark.passes import Mark
from shardmark.registry import Implementation, TimeBudget
from shardmark.world import World

pytestmark = [
    pytest.mark.question("What does FSDP save beside DDP?"),
    pytest.mark.cases(cases.NINE_LINEARS),
    pytest.mark.benchmark(min_rounds=9),
]


class NineLinearsStep:
    """One step on this rank's rows, wrapped; memory is told after each stage of making it."""

    def __init__(self, implementation: Implementation, case: NineLinearsCase, device: str) -> None:
        self.backend = dist.get_backend()
        with torch.device(device):
            self.inputs = torch.randn(case.batch, case.width)
            stage("data")
            model = square_linears(case.width, case.linears)
            stage("model")
            self.model = implementation.adapted(model)
            del model
        stage("wrapping")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Let go of the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss = None

    def step(self, mark: Mark) -> None:
        """Forward, backward, what is left of communication, optimizer."""
        self.loss = self.model(self.inputs).mean()
        mark("forward")
        self.loss.backward()
        mark("backward")
        self.model.finish_gradient_synchronization()
        mark("communication")
        self.optimizer.step()
        mark("optimizer")


@pytest.mark.family("data_parallel", only=("ddp",))
def test_ddp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    _measure(measure, implementation, case, world, ddp_peak)


@pytest.mark.family("fsdp")
def test_fsdp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    """With a unit for each linear."""
    _measure(measure, implementation, case, world, FSDP_PEAKS.get(implementation.name, ddp_peak))


def _measure(
    measure: Measure,
    implementation: Implementation,
    case: NineLinearsCase,
    world: World,
    peak: Callable[[NineLinearsCase], int],
) -> None:
    """Against this question's own formula, as the one that comes with the implementation is of the language model."""
    case = replace(case, ranks=world.size)
    family = registry.family(implementation.family)
    # The table compares them with one another; a user's own stands beside the reference.
    peer = implementation.name if implementation.name in family.implementations else family.reference
    measure(
        NineLinearsStep,
        replace(implementation, memory=peak),
        case,
        world_size=world.size,
        work=work(case, gathered_again=family.name == "fsdp" and not implementation.name.endswith("kept")),
        slack=1.02,
        time=TimeBudget(peer),
    )

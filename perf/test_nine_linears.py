"""What does FSDP save beside DDP? An MLP of nine square linears with bias and ReLU, plain SGD, a large batch.

Step by step the experiment of the FSDP tutorial at ODSC West 2024, whose figures are in `published/odsc_fsdp.csv`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from impl.accounting.nine_linears import SPREADS, peak, stages, work
from impl.fsdp.wrapping import by_size, whole
from impl.model.mlp import square_linears
from shardmark import cases
from shardmark.cases import NineLinearsCase
from shardmark.measure import Measure
from shardmark.memory import stage
from shardmark.plan import Mark
from shardmark.registry import Implementation
from shardmark.world import World

pytestmark = [
    pytest.mark.question("What does FSDP save beside DDP?"),
    pytest.mark.benchmark(min_rounds=7, max_time=0.2),
]


class NineLinearsStep:
    """One step on this rank's rows, wrapped; memory is told after each stage of making it."""

    def __init__(self, implementation: Implementation, case: NineLinearsCase, device: str) -> None:
        self.backend = dist.get_backend()
        with torch.device(device):
            self.inputs, self.targets = (torch.randn(case.batch, case.width) for _ in range(2))
            stage("data")
            model = square_linears(case.width, case.linears)
            stage("model")
            self.model = implementation.adapted(model, **_options(case))
            del model
        stage("wrapping")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def prepare(self) -> None:
        """Let go of the last step's gradients."""
        self.optimizer.zero_grad()

    def step(self, mark: Mark) -> None:
        """Forward, backward, what is left of communication, optimizer; until then output and loss are there."""
        output = self.model(self.inputs)
        loss = mse_loss(output, self.targets)
        mark("forward")
        loss.backward()
        mark("backward")
        self.model.finish_gradient_synchronization()
        mark("communication")
        self.optimizer.step()
        mark("optimizer")


def _options(case: NineLinearsCase) -> dict[str, Any]:
    """What the case asks for beside a unit for each linear, which is how each implementation comes."""
    third = case.linears // 3 * (case.width**2 + case.width)
    wrap = {"linears": {}, "thirds": {"wrap": by_size(third)}, "whole": {"wrap": whole}}[case.wrap]
    return wrap | ({"cpu_offload": True} if case.offload else {})


SHARDED = ("sharded", "fsdp1", "fsdp2")
"""Those whose options have rows of their own."""


@pytest.mark.family("data_parallel", only=("ddp",))
@pytest.mark.cases(cases.NINE_LINEARS)
def test_ddp(
    implementation: Implementation, case: NineLinearsCase, world: World, device: str, measure: Measure
) -> None:
    _measure(measure, implementation, case, world, device)


@pytest.mark.family("fsdp")
@pytest.mark.cases(cases.NINE_LINEARS)
def test_fsdp(
    implementation: Implementation, case: NineLinearsCase, world: World, device: str, measure: Measure
) -> None:
    """With a unit for each linear."""
    _measure(measure, implementation, case, world, device)


@pytest.mark.family("fsdp", option="wrap", only=SHARDED)
@pytest.mark.cases(cases.NINE_LINEARS_WRAPPED)
def test_wrapping(
    implementation: Implementation, case: NineLinearsCase, world: World, device: str, measure: Measure
) -> None:
    """With more in a unit."""
    _measure(measure, implementation, case, world, device)


@pytest.mark.family("fsdp", option="cpu_offload", only=SHARDED)
@pytest.mark.cases(cases.NINE_LINEARS_OFFLOADED)
def test_offload(
    implementation: Implementation, case: NineLinearsCase, world: World, device: str, measure: Measure
) -> None:
    """Of what a rank keeps."""
    if device == "cpu":
        pytest.skip("on a CPU there is nowhere to offload to")
    _measure(measure, implementation, case, world, device)


def _measure(
    measure: Measure, implementation: Implementation, case: NineLinearsCase, world: World, device: str
) -> None:
    """Against this question's own formula, or, of a user's own, DDP's: to save is its use."""
    case = replace(case, ranks=world.size)
    spread = SPREADS.get(implementation.name, SPREADS["ddp"])
    formula = partial(peak, spread=spread, device=device)
    kept = implementation.family != "fsdp" or implementation.name.endswith("kept") or case.wrap == "whole"
    # By itself the first linear is not gathered again: its input needs no gradient.
    again = 0 if kept else case.linears - (implementation.name == "simple")
    measure(
        NineLinearsStep,
        # Formulas and peers that come with implementations are of the language model; the table compares these.
        replace(implementation, memory=formula, time=None),
        case,
        world_size=world.size,
        work=work(case, gathered_again=again),
        slack=1.02,
        stages=stages(case, spread),
    )

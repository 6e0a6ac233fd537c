"""What does our training step cost?"""

import pytest
import torch
from training import StepCase, make_model

from shardmark.api import Grid, Work

CASES = Grid(smoke=[StepCase(4096, 128)], laptop=[StepCase(4096, 256)], paper=[StepCase(65536, 1024)])


class OneStep:
    """A case made ready: `measure` makes one on each rank, and calls `step` again and again."""

    backend = "torch"

    def __init__(self, implementation, case, device):
        self.step_of = implementation.target
        self.model = make_model(case.dim).to(device)
        self.x = torch.randn(case.rows, case.dim, device=device)

    def prepare(self):
        self.model.zero_grad()

    def step(self, mark):
        self.step_of(self.model, self.x)
        mark("backward")


@pytest.mark.family("step")
@pytest.mark.question("What does our training step cost?", short="our step")
@pytest.mark.cases(CASES)
def test_step(implementation, case, measure):
    product = 2 * case.rows * 4 * case.dim**2  # two in forward; in backward three, as x needs no gradient
    measure(OneStep, implementation, case, work=Work(flops=5 * product))

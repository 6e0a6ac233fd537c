"""One step of an MLP of square linears on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from impl.fsdp.cases import NineLinearsCase
from impl.fsdp.wrapping import by_size, whole
from impl.model.mlp import square_linears
from shardmark.memory import stage
from shardmark.plan import Mark
from shardmark.registry import Implementation


class NineLinearsStep:
    """One step on this rank's rows, wrapped; each stage of making it is reported to the meter."""

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

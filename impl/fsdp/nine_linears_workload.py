"""One step of an MLP of square linears on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from impl.fsdp.cases import NineLinearsCase
from impl.fsdp.wrapping import by_size, whole
from impl.model.mlp import square_linears
from shardmark.api import Implementation, Mark, stage


class NineLinearsStep:
    """One SGD step of the wrapped model on this rank's rows; memory is recorded after each stage of building it."""

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
        """Free the last step's gradients."""
        self.optimizer.zero_grad()

    def step(self, mark: Mark) -> None:
        # `output` and `loss` stay in memory until the step ends.
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
    """The case's options; without any, each linear is a unit."""
    third = case.linears // 3 * (case.width**2 + case.width)
    wraps: dict[str, dict[str, Any]] = {"linears": {}, "thirds": {"wrap": by_size(third)}, "whole": {"wrap": whole}}
    return wraps[case.wrap]

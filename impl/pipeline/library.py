"""PyTorch's own pipelines: the schedules of torch.distributed.pipelining, carried out by its runtime."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from impl.pipeline.runner import Build, Loss, Tensors
from shardmark.api import Unsupported, register

STAGES_OF_A_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""PyTorch's schedules, with the number of stages of each rank."""
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose stages are placed there and back: the first rank has the first stage and the last."""


def own_stages(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank under a schedule of PyTorch's, of all that there are."""
    if schedule in IN_A_V:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(STAGES_OF_A_RANK[schedule])]


class TorchPipeline:
    """See `impl.pipeline.Pipeline`."""

    def __init__(
        self,
        schedule: str,
        build: Build,
        group: dist.ProcessGroup,
        micro_batches: int,
        *,
        loss: Loss,
        unequal: bool = False,
    ) -> None:
        if unequal:
            raise Unsupported("PyTorch's stages take the shapes of the first micro-batch for those of all")
        each = STAGES_OF_A_RANK[schedule]
        self.group, self.stages = group, each * group.size()
        self.modules = {stage: build(stage, self.stages) for stage in own_stages(schedule, group.rank(), group.size())}
        self.device = next((p.device for m in self.modules.values() for p in m.parameters()), torch.device("cpu"))
        self.made = [PipelineStage(m, i, self.stages, self.device, group=group) for i, m in self.modules.items()]
        kind = getattr(pipelining, f"Schedule{schedule}")
        try:
            with warnings.catch_warnings(action="ignore"):
                self.schedule = kind(
                    self.made if each > 1 else self.made[0],
                    n_microbatches=micro_batches,
                    loss_fn=loss,
                    scale_grads=False,
                )
        except ValueError as error:
            raise Unsupported(str(error).partition("\n")[0]) from error

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        """PyTorch cuts a batch into micro-batches of as many rows."""
        whole = [torch.cat(each) for each in zip(*inputs, strict=True)] if 0 in self.modules else []
        losses: list[Tensor] = []  # a loss function that noted its own would see those of PyTorch's trial of shapes
        last = {"target": torch.cat(list(targets)), "losses": losses} if self.stages - 1 in self.modules else {}
        self.schedule.step(*whole, return_outputs=False, **last)
        for stage in self.made:  # they keep outputs until the next step
            stage.clear_runtime_states()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        total += sum(loss.detach() for loss in losses)
        dist.all_reduce(total, group=self.group)
        return total


def _register(name: str, schedule: str) -> None:
    register(
        "pipeline",
        name,
        partial(TorchPipeline, schedule),
        tested_briefly=True,
        called=f"PyTorch's {schedule}",
    )


_register("torch_gpipe", "GPipe")
_register("torch_1f1b", "1F1B")
_register("torch_interleaved", "Interleaved1F1B")
_register("torch_interleaved_zero_bubble", "InterleavedZeroBubble")
_register("torch_zero_bubble_v", "ZBVZeroBubble")
_register("torch_dualpipe_v", "DualPipeV")

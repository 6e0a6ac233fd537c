"""The MLP ladder on ranks, and the cases that all rungs of the ladder start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from impl.checkpointing import full
from impl.fsdp.cases import RankRung
from impl.fsdp.simple import data_parallel, init_weights
from impl.training_step.cases import TrainingStepCase
from impl.training_step.models import language_model, next_token_loss, random_tokens
from impl.training_step.rank_step import RankStep
from shardmark.api import Grid, Implementation, Made, Mark


def _cases(model: str, batch: int, context: int) -> list[TrainingStepCase]:
    float32 = TrainingStepCase(model, batch, context)
    return [float32, replace(float32, dtype="bfloat16", autocast_loss=True)]


MLP_LADDER = Grid(
    smoke=_cases("mlp-tiny", 2, 32)[:1],
    laptop=_cases("mlp-mini", 4, 128),
    paper=_cases("mlp-4096", 8, 4096),
    full=[case for model, context in (("mlp-1024", 1024), ("mlp-4096", 4096)) for case in _cases(model, 8, context)],
)
"""Eager training steps: in float32 the first rung, in bfloat16 the rung with autocast only, around model and loss."""


def shard_model(case: RankRung, mesh: DeviceMesh, report: Callable[[str], None] = lambda name: None) -> nn.Module:
    """The case's model, sharded over the ranks of the mesh; `report` is called with each stage's name at its end."""
    device = mesh.device_type
    with torch.device("meta" if case.meta else device):
        model = language_model(case)
    report("model")
    dtypes = {name: getattr(torch, dtype) for name, dtype in (("param", case.dtype), ("reduce", case.reduce_dtype))}
    policy = MixedPrecisionPolicy(param_dtype=dtypes["param"], reduce_dtype=dtypes["reduce"])
    data_parallel(model, mesh, mp_policy=policy)
    report("data_parallel")
    if case.meta:
        model.to_empty(device=device)
        report("to_empty")
        init_weights(model)
        report("init_weights")
    return model


class RankLadderStep(RankStep):
    """One AdamW step of the MLP language model with sharded parameters, by an implementation of training_step."""

    def make(self, case: RankRung) -> Made:
        model = shard_model(case, init_device_mesh(torch.get_default_device().type, (case.ranks,)))
        return Made(model, random_tokens(case), next_token_loss, cast(nn.ModuleList, model.blocks))

    def build(self, implementation: Implementation, case: Any) -> tuple[Any, Optimizer]:
        # AdamW is fused, so that the optimizer itself needs no temporaries.
        model = self.made.module
        if case.checkpointed:
            full(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.training_step = implementation.adapted(model, optimizer)
        return model, optimizer

    def step(self, mark: Mark) -> None:
        # All communication is in forward and backward, so there is nothing to synchronize.
        self.training_step(*self.made.batch, mark)

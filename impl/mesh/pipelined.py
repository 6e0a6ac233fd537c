"""A pipeline of stages along `pp`, each of which is parallelized over the mesh's other axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from impl.clipping import total_norm
from impl.mesh.decoder import Batch, Decoder, losses_of
from impl.mesh.library import torch_parallel
from impl.mesh.stages import EMBEDDINGS, OUTPUT, cut_to_stage, passed_on
from impl.mesh.trainer import MeshTrainer, Named
from impl.pipeline import one_forward_one_backward, planned
from impl.pipeline.actions import ranks_of_stages
from impl.pipeline.contract import Schedule
from impl.pipeline.runner import Runner
from shardmark.api import Race, Unsupported, register

FOR_EACH_STAGE = 2
"""Micro-batches for each stage: those of a step are cut into as many, if they have the rows."""


class PipelinedTrainer(MeshTrainer):
    """The suite's own step around a schedule with one stage a rank, whose stages `parallelize` is called with; they
    pass on what the model's dtype is. See `impl.mesh.Trainer` for its contract.

    Unsupported for a mesh without `pp`, for other models than `Decoder`, for fewer layers than stages, and for a
    schedule with several stages a rank. It takes neither an objective nor a type of norm.
    """

    def __init__(
        self,
        schedule: Schedule,
        parallelize: Callable[[nn.Module, DeviceMesh], nn.Module],
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Named], Optimizer],
        mesh: DeviceMesh,
        *,
        max_norm: float = 1.0,
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if "pp" not in names or mesh["pp"].size() == 1:
            raise Unsupported("it takes meshes with pp")
        self._schedule, self._group = schedule, mesh.get_group("pp")
        self._stage, self._stages = self._group.rank(), self._group.size()
        self._runners: dict[int, Runner] = {}

        def staged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            """`parallelize` for the trainer, which has the whole model's names by then."""
            if not isinstance(model, Decoder):
                raise Unsupported("it cuts the suite's decoder alone")
            self._dim, self._dtype = model.size.dim, model.output.weight.dtype
            self._is_tied = model.output.weight is model.tok_embeddings.weight
            stage = cut_to_stage(model, self._stage, self._stages)
            others = tuple(name for name in names if name != "pp")
            return parallelize(stage, mesh[others]) if others else stage

        super().__init__(staged, model_fn, optimizer_fn, mesh, max_norm=max_norm)

    def _own_name(self, name: str) -> str:
        """The last stage has a copy of tied embeddings, under their name."""
        own = super()._own_name(name)
        return EMBEDDINGS if self._is_tied and own == OUTPUT else own

    def _run(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        self._share = self._data_ranks / tokens.double()
        batches = [
            piece
            for batch, pieces in zip(batches, self._pieces(batches), strict=True)
            for piece in zip(*(each.tensor_split(pieces) for each in batch), strict=True)
        ]
        total = self._runner(len(batches)).step(
            [(tokens,) for tokens, _, _ in batches],
            [targets for _, _, targets in batches],
            [{"positions": positions} for _, positions, _ in batches],
        )
        if self._is_tied and self._stage in (0, self._stages - 1):
            self._add_other_copy(self.parameters[EMBEDDINGS])
        return total / self._share

    def _pieces(self, batches: Sequence[Batch]) -> list[int]:
        """Number of pieces that each micro-batch is cut into: the same on every rank, as their stages communicate in
        each pass, though some may have more rows."""
        rows = torch.tensor([len(tokens) for tokens, _, _ in batches], device=batches[0][0].device)
        for group in self._groups:
            dist.all_reduce(rows, dist.ReduceOp.MIN, group=group)
        wanted = math.ceil(FOR_EACH_STAGE * self._stages / len(batches))
        return [max(1, min(wanted, each)) for each in rows.tolist()]

    def _runner(self, micro_batches: int) -> Runner:
        """The runner of the schedule for that number of micro-batches, which may change from step to step."""
        if micro_batches not in self._runners:
            plan = planned(self._schedule, self._stages, micro_batches)
            if len(ranks_of_stages(plan)) > self._stages:
                raise Unsupported("it takes schedules with one stage a rank")
            like = partial(passed_on, self._dim, self._dtype)
            self._runners[micro_batches] = Runner(plan, self._build, self._group, self._loss, like)
        return self._runners[micro_batches]

    def _build(self, stage: int, stages: int) -> nn.Module:
        return self.model

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The micro-batch's part of the step's loss; the data ranks' gradients are averaged."""
        losses = losses_of(logits, targets)
        return losses * self._share.to(losses.dtype)

    def _add_other_copy(self, embeddings: nn.Parameter) -> None:
        """Add the gradients of both copies of tied embeddings, on their two ranks."""
        if not embeddings.requires_grad:
            return
        own = embeddings.grad
        assert own is not None
        if isinstance(embeddings, DTensor) and isinstance(own, DTensor):  # PyTorch may have left it cut in another way
            embeddings.grad = own = own.redistribute(placements=embeddings.placements)
            own = own.to_local()
        theirs, other = torch.empty_like(own), self._stages - 1 - self._stage
        messages = [
            dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
        ]
        for handle in dist.batch_isend_irecv(messages):
            handle.wait()
        own += theirs

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm over all stages; tied embeddings count in the first one."""
        counted = [
            parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and (name != EMBEDDINGS or self._stage == 0)
        ]
        own = total_norm(counted, self.norm_type).to(torch.float64)
        every = [torch.empty_like(own) for _ in range(self._stages)]
        dist.all_gather(every, own, group=self._group)
        return torch.linalg.vector_norm(torch.stack(every), self.norm_type)

    def full_parameters(self) -> dict[str, Tensor]:
        return self._of_all_stages(super().full_parameters())

    def full_gradients(self) -> dict[str, Tensor]:
        return self._of_all_stages(super().full_gradients())

    def _of_all_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        stages: list[Any] = [None] * self._stages
        dist.all_gather_object(stages, own, group=self._group)
        return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}


register(
    "mesh",
    "pipelined",
    partial(PipelinedTrainer, one_forward_one_backward, torch_parallel),
    time=Race("naive"),
    called="a 1F1B pipeline",
)

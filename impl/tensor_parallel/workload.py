"""One training step with tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from impl.mesh.decoder import Decoder
from impl.mesh.trainer import MeshTrainer, Named, by_mesh
from impl.tensor_parallel.cases import SIZES, TensorParallelCase
from impl.tensor_parallel.contract import TOKENS
from shardmark.api import Implementation, Mark, Mesh

MAX_NORM = 1.0


class TensorParallelStep:
    """A step of the suite's trainer, with clipping, on the batch that every rank sees."""

    def __init__(self, implementation: Implementation, case: TensorParallelCase, device: str) -> None:
        self.backend = dist.get_backend()
        mesh = Mesh.parse(case.mesh).device_mesh(torch.device(device).type)
        random = torch.Generator(device).manual_seed(0)  # every rank draws the same
        shape = case.batch, case.context + 1
        tokens = torch.randint(SIZES[case.model].vocabulary, shape, generator=random, device=device)
        positions = torch.arange(case.context, device=device).expand(case.batch, -1)
        self.batches = [(tokens[:, :-1].clone(), positions.clone(), tokens[:, 1:].clone())]
        del tokens

        def model() -> nn.Module:
            torch.manual_seed(0)
            with torch.device(device):
                return Decoder(SIZES[case.model]).to(getattr(torch, case.dtype))

        self.trainer = MeshTrainer(
            self.parallelize(implementation), model, _adamw, mesh, max_norm=MAX_NORM, objective=TOKENS
        )

    def parallelize(self, implementation: Implementation) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
        """The technique; computation alone has another."""
        made: Callable[[nn.Module, DeviceMesh], nn.Module] = implementation.adapted
        return made

    def prepare(self) -> None:
        """Nothing to reset: a step frees the last one's gradients."""

    def step(self, mark: Mark) -> None:
        """Forward, backward, clipping and the optimizer."""
        self.trainer.step(self.batches)
        mark("step")


def _adamw(named: Named) -> Optimizer:
    return AdamW(by_mesh([parameter for _, parameter in named]), fused=True)


class ForwardPass:
    """The loss of a batch, whose graph is kept."""

    def __init__(self, implementation: Implementation, case: TensorParallelCase, device: str) -> None:
        step = TensorParallelStep(implementation, case, device)
        self.backend, self.model, self.batches = step.backend, step.trainer.model, step.batches

    def prepare(self) -> None:
        """Nothing to reset."""

    def step(self, mark: Mark) -> None:
        losses: Sequence[torch.Tensor] = [self.model(*batch) for batch in self.batches]
        mark("forward")
        sum(losses).backward()  # type: ignore[union-attr]

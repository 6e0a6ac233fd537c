"""Train a composition on ranks, and compare its gradients and norm with one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from impl.distributed import full
from impl.mesh.trainer import without_wrappers
from impl.pipeline import planned, run
from impl.pipeline.actions import ranks_of_stages
from impl.pipeline.library import own_stages
from shardmark.api import Mesh, Share
from shardmark.ranks.world import RankError, World
from studies.composed.features import CONTEXT, OURS, SCHEDULES, Composition, Stage, applied, whole_model

ROWS, VOCABULARY = 8, 48
"""Rows of each rank with rows of its own."""
MICRO_BATCHES = ROWS // 2
PASSES = 3
MAX_NORM = 0.1
WITHIN = 1e-12
SECONDS = 60.0


@dataclass(frozen=True)
class Cell:
    """`says` is one line: the first difference, or the error."""

    composition: Composition
    outcome: str
    says: str = ""


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(VOCABULARY, (rows, CONTEXT), generator=random) for _ in range(2))
    return tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over the tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def in_one_process(composition: Composition, row_ranks: int) -> tuple[dict[str, Tensor], float]:
    """Gradients after clipping, and their norm before."""
    model = whole_model(composition, "cpu")
    passes = PASSES if "accumulation" in composition else 1
    for seed in range(passes):
        tokens, targets = batch(seed, ROWS * row_ranks)
        positions = torch.arange(CONTEXT).expand(len(tokens), -1)
        (loss_of(model(tokens, positions), targets) / (passes * targets.numel())).backward()
    norm = float("nan")
    if "clip_grad_norm_" in composition:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, norm


def on_rank(composition: Composition, mesh: Mesh, device: str) -> tuple[dict[str, Tensor], float]:
    """Whole gradients of this rank's stages after clipping, and the norm that PyTorch returns there."""
    on = mesh.device_mesh(device)
    whole = whole_model(composition, device)
    rank, ranks = (on.get_local_rank("pp"), on["pp"].size()) if composition.schedule else (0, 1)
    indices, stages = _stages_of(composition.schedule, rank, ranks)
    made = [Stage(whole, index, stages) for index in indices]
    if composition.schedule is None and "tied" in composition:
        made[0].output.weight = made[0].tok_embeddings.weight  # type: ignore[union-attr, assignment]
    modules = [applied(each, composition, on) for each in made]
    rows = mesh.along(Share.ROWS)
    row_ranks, own = mesh.ranks(rows), mesh.index(dist.get_rank(), rows)
    passes = PASSES if "accumulation" in composition else 1
    scale = 1 / (passes * ROWS * CONTEXT)  # gradients are averaged over the ranks
    for seed in range(passes):
        tokens, targets = (each.chunk(row_ranks)[own].to(device) for each in batch(seed, ROWS * row_ranks))
        context: AbstractContextManager[Any] = loss_parallel() if "loss_parallel" in composition else nullcontext()
        with context:
            if composition.schedule:
                _pipelined(composition.schedule, modules, indices, stages, on, (tokens, targets), scale)
            else:
                (loss_of(modules[0](tokens), targets) * scale).backward()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    norm = float("nan")
    if "clip_grad_norm_" in composition:
        norm = full(nn.utils.clip_grad_norm_(parameters, MAX_NORM)).item()
    named = [(without_wrappers(name), p) for module in modules for name, p in module.named_parameters()]
    return {name: full(p.grad.detach()).clone() for name, p in named if p.grad is not None}, norm


def _stages_of(schedule: str | None, rank: int, ranks: int) -> tuple[list[int], int]:
    """The rank's stages, and the number of all."""
    if schedule is None:
        return [0], 1
    if schedule in SCHEDULES:
        return own_stages(schedule, rank, ranks), ranks * SCHEDULES[schedule]
    every = ranks_of_stages(planned(OURS[schedule], ranks, MICRO_BATCHES))
    return [stage for stage, of in every.items() if of == rank], len(every)


def _pipelined(
    schedule: str,
    modules: Sequence[nn.Module],
    indices: Sequence[int],
    stages: int,
    mesh: DeviceMesh,
    whole: tuple[Tensor, Tensor],
    scale: float,
) -> None:
    device, group = whole[0].device, mesh.get_group("pp")
    tokens, targets = whole
    if schedule in OURS:
        own = dict(zip(indices, modules, strict=True))
        pipeline = run(
            OURS[schedule], lambda stage, _: own[stage], group, MICRO_BATCHES, loss=lambda x, y: loss_of(x, y) * scale
        )
        pipeline.step([(each,) for each in tokens.chunk(MICRO_BATCHES)], targets.chunk(MICRO_BATCHES))
        return
    made = [PipelineStage(m, i, stages, device, group=group) for m, i in zip(modules, indices, strict=True)]
    kind = getattr(pipelining, f"Schedule{schedule}")
    running = kind(
        made if SCHEDULES[schedule] > 1 else made[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda logits, targets: loss_of(logits, targets) * scale,
        scale_grads=False,
    )
    running.step(*([tokens] if 0 in indices else []), **({"target": targets} if stages - 1 in indices else {}))


def judged(composition: Composition) -> Cell:
    """Run it on ranks of its own: right, wrong or refused."""
    mesh = Mesh(tuple((axis, 2) for axis in composition.axes) or (("dp", 1),))
    gradients, norm = in_one_process(composition, mesh.ranks(mesh.along(Share.ROWS)))
    world = World(mesh.size, "cpu")
    try:
        ranks = world.run(on_rank, composition, mesh, "cpu", deadline=SECONDS)
    except RankError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Cell(composition, "refused", next((line for line in lines if "Error" in line), lines[0]))
    finally:
        world.close()
    wrong = differences(ranks, gradients, norm)
    return Cell(composition, "wrong", wrong[0]) if wrong else Cell(composition, "right")


def differences(
    ranks: Sequence[tuple[dict[str, Tensor], float]], gradients: dict[str, Tensor], norm: float
) -> list[str]:
    """A line for each difference from one process."""
    found = []
    for rank, (_, own) in enumerate(ranks):
        if not isnan(norm) and abs(own / norm - 1) > WITHIN:
            found.append(f"rank {rank} has the norm {own:.6g}, and one process {norm:.6g}")
            break
    for name, right in gradients.items():
        having = [(rank, own[name]) for rank, (own, _) in enumerate(ranks) if name in own]
        if not having:
            found.append(f"{name} has no gradient")
        for rank, own in having:
            apart = (own - right).abs().max().item() / right.abs().max().item()
            if not apart <= WITHIN:
                found.append(f"the gradient of {name} is off by {apart:.2g} of its largest value on rank {rank}")
                break
    return found

"""PyTorch's own parallelisms, each applied as its documentation says, to a decoder or to the stages of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from impl.mesh.decoder import Decoder, DecoderSize
from impl.pipeline import is_schedule
from impl.pipeline.library import STAGES_OF_A_RANK as SCHEDULES
from shardmark.api import family

LAYERS = 4
"""Two stages for each of two ranks of a pipeline."""

CONTEXT = 12

OURS = {
    f"our {each.called}": each.target
    for each in family("pipeline").implementations.values()
    if is_schedule(each.target)
}
"""Schedules that the suite's own runner carries out."""
OF_A_TRAINER = ("clip_grad_norm_", "tied")
"""Features that reach over all stages, for which no runner is there: `impl.mesh.pipelined` has them."""

AXES = {
    "ddp": ("dp",),
    "fully_shard": ("shard",),
    "fully_shard root": ("shard",),
    "HSDP": ("dp", "shard"),
    "tensor": ("tp",),
    "sequence": ("tp",),
    "loss_parallel": ("tp",),
    "clip_grad_norm_": (),
    "checkpoint": (),
    "accumulation": (),
    "tied": (),
    **dict.fromkeys((*SCHEDULES, *OURS), ("pp",)),
}
"""Axes that a feature lies on, each of two ranks."""
ORDER = ("pp", "dp", "shard", "tp")
"""Axes of a mesh, the outermost first."""
ALTERNATIVES = (
    ("ddp", "fully_shard", "fully_shard root", "HSDP"),
    ("tensor", "sequence", "loss_parallel"),
    (*SCHEDULES, *OURS),
)
"""Features of which a model has one at most."""


@dataclass(frozen=True)
class Composition:
    """One or two features."""

    features: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh's axes, each of two ranks; without any, one axis of one rank."""
        return tuple(axis for axis in ORDER if any(axis in AXES[each] for each in self.features))

    @property
    def schedule(self) -> str | None:
        """The pipeline's schedule, if it has one."""
        return next((each for each in self.features if each in SCHEDULES or each in OURS), None)

    def __contains__(self, feature: str) -> bool:
        return feature in self.features

    def __str__(self) -> str:
        return " x ".join(self.features)


def compositions() -> Iterator[Composition]:
    """Each feature alone, and each pair that goes together."""
    yield from (Composition((each,)) for each in AXES)
    for pair in combinations(AXES, 2):
        ours = any(each in OURS for each in pair) and any(each in OF_A_TRAINER for each in pair)
        if not ours and not any(set(pair) <= set(each) for each in ALTERNATIVES):
            yield Composition(pair)


def whole_model(composition: Composition, device: str) -> Decoder:
    """The model of one process, the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Decoder(DecoderSize(layers=LAYERS, tied="tied" in composition)).double().to(device)


class Stage(nn.Module):
    """Some layers of a decoder, under their names there; with the embedding in the first stage, and with the output in
    the last."""

    def __init__(self, whole: Decoder, index: int, stages: int) -> None:
        super().__init__()
        mine = range(index * LAYERS // stages, (index + 1) * LAYERS // stages)
        model = copy.deepcopy(whole)
        self.tok_embeddings = model.tok_embeddings if index == 0 else None
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in mine})
        self.norm = model.norm if index == stages - 1 else None
        self.output = model.output if index == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations, (rows, CONTEXT) or (rows, context, dim): perhaps a rank's slices of the context."""
        positions = torch.arange(CONTEXT, device=x.device).expand(x.shape[0], -1)
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions)
        return x if self.output is None or self.norm is None else self.output(self.norm(x))


def applied(stage: Stage, composition: Composition, mesh: DeviceMesh) -> nn.Module:
    """Cut over tp, then recomputed, then sharded: the order of PyTorch's documentation."""
    if any(each in composition for each in ("tensor", "sequence", "loss_parallel")):
        _cut(stage, composition, mesh["tp"])
    if "checkpoint" in composition:
        for name, layer in stage.layers.items():
            stage.layers[name] = checkpoint_wrapper(layer)
    if "ddp" in composition:
        return DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    rows = {"HSDP": ("dp", "shard"), "fully_shard": ("shard",), "fully_shard root": ("shard",)}
    for name, axes in rows.items():
        if name in composition:
            for layer in stage.layers.values() if name != "fully_shard root" else ():
                fully_shard(layer, mesh=mesh[axes])
            fully_shard(stage, mesh=mesh[axes])
    return stage


def _cut(stage: Stage, composition: Composition, tp: DeviceMesh) -> None:
    slices = "sequence" in composition
    row = RowwiseParallel(output_layouts=Shard(1)) if slices else RowwiseParallel()
    plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")} | {"attention.wo": row}
    plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(), "feed_forward.w2": row}
    if slices:
        whole = PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
        )
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(), "attention": whole}  # type: ignore[dict-item]
        plan["feed_forward"] = PrepareModuleInput(  # type: ignore[assignment]
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    for layer in stage.layers.values():
        parallelize_module(layer, tp, plan)  # type: ignore[arg-type]
    after = Shard(1) if slices else Replicate()
    if stage.tok_embeddings is not None:
        parallelize_module(
            stage,
            tp,
            {"tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=after)},
        )
    if stage.output is not None:
        loss = "loss_parallel" in composition
        output = ColwiseParallel(
            input_layouts=after, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        )
        parallelize_module(stage, tp, {"output": output} | ({"norm": SequenceParallel()} if slices else {}))

"""Training on a mesh beside one process: models of several kinds, batches that ranks share, and what each step gave."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from io import BytesIO
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from correctness.support.batches import left_as_they_are, packed
from impl.mesh import Decoder, DecoderSize, MeshTrainer, OneProcess
from impl.mesh.decoder import IGNORED, Batch
from shardmark.api import Implementation, Mesh

CONTEXT = 12


class WithASpare(Decoder):
    """Has parameters that no forward pass uses."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__(size)
        self.spare = nn.Linear(size.dim, size.dim)


@dataclass(frozen=True)
class Kind:
    """A model and its optimizer."""

    size: DecoderSize = field(default_factory=DecoderSize)
    of: type[Decoder] = Decoder
    frozen: tuple[str, ...] = ()
    output_scale: float = 1.0
    """Factor of the output's weight: exponentials of logits in the thousands overflow."""
    adam: bool = False
    """AdamW, whose step hides a factor of the gradients; otherwise SGD with momentum, whose step does not."""


KINDS = {
    "plain": Kind(),
    "tied": Kind(DecoderSize(tied=True, layers=4)),  # two for each of two stages
    "experts": Kind(DecoderSize(experts=4)),
    "frozen_and_unused": Kind(
        of=WithASpare,
        frozen=("tok_embeddings.weight", "layers.0.feed_forward.w1.weight", "layers.1.ffn_norm.weight"),
        output_scale=3000.0,
        adam=True,
    ),
}


def model_of(kind: str, device: str) -> Decoder:
    """A model of that kind in float64, with the same weights on every rank."""
    chosen = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = in_float64(chosen.of(chosen.size))
    model.output.weight.data.mul_(chosen.output_scale)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in chosen.frozen)
    return model.to(device)


def in_float64(model: Decoder) -> Decoder:
    """The model in float64, whose norms' weights are not 1 and biases not 0, so that it shows where one is left out."""
    for parameter in model.double().parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def optimizer_of(kind: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Groups by names: norms do not decay, nor does what has no gradient (a wrapper may give it zeros), and embeddings
    learn faster."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            decay, rate = 0.0 if "norm" in name or "spare" in name else 0.1, 0.02 if "tok_embeddings" in name else 0.01
            groups.setdefault((decay, rate), []).append(parameter)
    found = [{"params": each, "weight_decay": decay, "lr": rate} for (decay, rate), each in groups.items()]
    return AdamW(found, eps=1e-4) if KINDS[kind].adam else SGD(found, lr=0.01, momentum=0.9)


@cache
def batches(row_groups: int, step: int) -> tuple[Batch, ...]:
    """The whole micro-batches of a step: one to three, of which each group of ranks has a row at least and some have
    one more, with targets left out here and there: the last group, or the last of two slices, has none in the last
    micro-batch of some steps, and none at all in others. After the first step positions begin again within a row, as
    where documents are packed, and rows of some micro-batches are shorter."""
    random = torch.Generator().manual_seed(1000 + step)
    found = []
    for micro in range(1 + step % 3):
        rows = row_groups + (step + micro) % (row_groups + 1)
        context = CONTEXT // (1 + (step + micro) % 2)
        tokens = torch.randint(DecoderSize.vocabulary, (rows, context), generator=random)
        targets = torch.randint(DecoderSize.vocabulary, (rows, context), generator=random)
        kept = torch.rand((rows, 1), generator=random).clamp(min=0.2)
        left_out = torch.rand((rows, context), generator=random) > kept
        left_out[0, 0] = False
        targets[left_out] = IGNORED
        positions = packed(rows, context, random) if step else torch.arange(context).expand(rows, -1)
        last = targets[-(rows // row_groups) :] if row_groups > 1 else targets[:, context // 2 :]
        if step % 3 and micro >= 2 - step % 3:
            last.fill_(IGNORED)
        found.append((tokens, positions, targets))
    return tuple(found)


@dataclass
class Trace:
    """Results of a trainer: each step's loss and norm; after some, gradients and parameters."""

    max_norm: float = math.inf
    """Gradients were clipped to it."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    parameters: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    local: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """By name: which part of the parameter the rank has, and a digest of its bytes, after the last step."""
    digests: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    """Digests of the gradients and parameters after each step that is looked at."""

    def scale(self, norm: float) -> float:
        """The factor by which clipping scales gradients of that norm."""
        return min(1.0, self.max_norm / (norm + 1e-6))


def train(
    trainer: Any, of_step: Callable[[int], Sequence[Any]], steps: Sequence[int], max_norm: float = math.inf
) -> Trace:
    """Train for these steps. Gradients and parameters are kept of the first two and of the last one. Losses and norms
    are read after the last step, as training logs them only now and then."""
    trace, results = Trace(max_norm), []
    kept = {*steps[:2], steps[-1]}
    for step in steps:
        given = of_step(step)
        with left_as_they_are(given):
            returned = trainer.step(given)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise TypeError(f"step returned {type(returned).__name__}, not (loss, norm)")
        if any(isinstance(each, Tensor) and each.requires_grad for each in returned):
            raise TypeError("step returned a tensor with a graph, which lives as long as it")
        results.append(returned)
        if step in kept:
            trace.gradients[step] = _on_cpu(trainer.full_gradients())
            trace.parameters[step] = _on_cpu(trainer.full_parameters())
    trace.losses = [float(loss) for loss, _ in results]
    trace.norms = [float(norm) for _, norm in results]
    return trace


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


@cache
def max_norm_of(groups: int, kind: str) -> float:
    """The middle of the norms of the first steps, for that many groups of rows: some steps are clipped, others not."""
    norms = train(one_process(kind, math.inf), partial(batches, groups), range(6)).norms
    return float(f"{median(norms):.2g}")


def trainer_of(
    implementation: Implementation,
    mesh: Mesh,
    kind: str,
    device: str,
    max_norm: float,
    of: Callable[[str, str], Decoder] = model_of,
    on: DeviceMesh | None = None,
    **options: Any,
) -> Any:
    """A trainer on that mesh of all ranks, or on a mesh of its axes with some of them."""
    return implementation.watched(
        partial(of, kind, device),
        partial(optimizer_of, kind),
        mesh.device_mesh(torch.device(device).type) if on is None else on,
        max_norm=max_norm,
        **options,
    )


def own_batches(
    mesh: Mesh, device: str, step: int, backwards: bool = False, of: Callable[[int, int], Sequence[Batch]] = batches
) -> list[Batch]:
    """This rank's part of each micro-batch of the step; the world may have several meshes, one after another."""
    whole, rank = of(mesh.row_groups, step), dist.get_rank() % mesh.size
    shared = (mesh.share(batch, rank) for batch in (whole[::-1] if backwards else whole))
    return [(tokens.to(device), positions.to(device), targets.to(device)) for tokens, positions, targets in shared]


def train_on_rank(
    implementation: Implementation,
    mesh: Mesh,
    kind: str,
    device: str,
    steps: int,
    max_norm: float,
    backwards: bool = False,
) -> Trace:
    """With `backwards`, each step's micro-batches in the other order."""
    trainer = trainer_of(implementation, mesh, kind, device, max_norm)
    return traced(trainer, partial(own_batches, mesh, device, backwards=backwards), steps)


def traced(trainer: Any, of_step: Callable[[int], Sequence[Any]], steps: int, rank: int | None = None) -> Trace:
    """Train on this rank of the mesh, which is that of the world where none is given; of all ranks the first one has
    tensors, and the others digests of theirs."""
    trace = train(trainer, of_step, range(steps))
    if isinstance(trainer, MeshTrainer):
        trace.local = {name: _part(parameter) for name, parameter in trainer.parameters.items()}
    for what, looked_at in (("gradients", trace.gradients), ("parameters", trace.parameters)):
        for step, tensors in looked_at.items():
            trace.digests[what, step] = {name: digest(tensor) for name, tensor in tensors.items()}
    if dist.get_rank() if rank is None else rank:  # all ranks have the same, to the bit, and the digests tell
        trace.gradients, trace.parameters = {}, {}
    return trace


def _part(parameter: Tensor) -> tuple[Any, str]:
    if not isinstance(parameter, DTensor):
        return "whole", digest(parameter.detach())
    place = parameter.device_mesh.get_coordinate() or []
    cut = [(dim, place[dim]) for dim, each in enumerate(parameter.placements) if not each.is_replicate()]
    return tuple(cut), digest(parameter.to_local().detach())


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def resume_on_rank(implementation: Implementation, mesh: Mesh, kind: str, device: str, max_norm: float) -> list[Trace]:
    """Train, save, and train on; load what was saved into a new trainer, and train on as well."""
    trainer, saved = trainer_of(implementation, mesh, kind, device, max_norm), BytesIO()
    own = partial(own_batches, mesh, device)
    train(trainer, own, range(2))
    torch.save(trainer.state_dict(), saved)
    going_on = range(2, 5)
    went_on = train(trainer, own, going_on)
    again = trainer_of(implementation, mesh, kind, device, max_norm)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=False))
    resumed = train(again, own, going_on)
    for trace, of in ((went_on, trainer), (resumed, again)):
        trace.parameters = {0: _on_cpu(of.full_parameters())}
    return [went_on, resumed]


def one_process(kind: str, max_norm: float, of: Callable[[str, str], Decoder] = model_of, **options: Any) -> OneProcess:
    return OneProcess(partial(of, kind, "cpu"), partial(optimizer_of, kind), None, max_norm=max_norm, **options)


@cache
def in_one_process(groups: int, kind: str, steps: int) -> Trace:
    """The trace of one process that trains on whole batches, which ranks see as that many groups of rows."""
    max_norm = max_norm_of(groups, kind)
    return train(one_process(kind, max_norm), partial(batches, groups), range(steps), max_norm)

"""Training with tensor parallelism beside one process: models of several kinds, and what each step gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from correctness.mesh.training import Trace, in_float64, own_batches, traced, train
from correctness.support.batches import packed
from impl.mesh import Decoder, DecoderSize, MeshTrainer, Objective, OneProcess
from impl.mesh.decoder import IGNORED, Batch
from impl.tensor_parallel import TOKENS
from shardmark.api import Implementation, Mesh, find_blocks

MAX_NORM = 2.0
STEPS = 4
"""Number of steps in which every kind of batch occurs: see `batches`."""
EVEN = DecoderSize(dim=48, heads=24, kv_heads=12, hidden=48, vocabulary=48)
"""Sizes that two, three and four ranks divide."""

LARGE = 3000.0
"""Factor by which logits are in the thousands."""


@dataclass(frozen=True)
class Kind:
    """A model and its optimizer."""

    size: DecoderSize = EVEN
    biases: bool = False
    frozen: tuple[str, ...] = ()
    adam: bool = False
    """AdamW, whose step hides a factor of the gradients; otherwise SGD with momentum, whose step does not."""
    context: int = 12
    """Tokens of a row, or twice as many."""
    rows: int = 0
    """Rows of a micro-batch beside a few."""
    output_scale: float = 1.0
    """Factor of the output's weight: exponentials of logits in the thousands overflow."""


def _sized(**changes: Any) -> DecoderSize:
    return DecoderSize(**{**EVEN.__dict__, **changes})


KINDS = {
    "even": Kind(),
    "sizes_that_do_not_divide": Kind(_sized(hidden=50, vocabulary=53), context=7),
    "few_kv_heads": Kind(_sized(kv_heads=3), biases=True, context=6),
    "tied": Kind(_sized(tied=True)),
    "thousands_of_tokens": Kind(rows=201),
    "fused": Kind(_sized(fused=True), biases=True, output_scale=LARGE),
    "biases": Kind(
        _sized(vocabulary=600),  # bfloat16 has not every integer above 256
        biases=True,
        frozen=(
            *("layers.0.attention.wo.weight", "layers.0.feed_forward.w1.weight", "layers.1.attention.wk.bias"),
            *("layers.1.attention.wq.weight", "layers.1.feed_forward.w2.weight", "output.weight"),
        ),
    ),
    "frozen": Kind(
        adam=True,
        frozen=(
            *("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"),
            *("layers.1.ffn_norm.weight", "layers.1.feed_forward.w2.weight"),
        ),
    ),
}


def model_of(kind: str, device: str) -> Decoder:
    """The same model on every rank."""
    chosen = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = weighted(Decoder(chosen.size), lambda name: chosen.biases, chosen.output_scale)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in chosen.frozen)
    return model.to(device)


def weighted(model: Decoder, has_bias: Callable[[str], bool], output_scale: float) -> Decoder:
    """The model, as `in_float64` makes it, with a bias in each linear layer of which `has_bias(name)` is true, and an
    output's weight that is scaled."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and has_bias(name):
            module.bias = nn.Parameter(torch.empty(module.out_features))
    model.output.weight.data.mul_(output_scale)
    return in_float64(model)


def optimizer_of(kind: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Norms and biases do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault("norm" in name or name.endswith("bias"), []).append(parameter)
    found = [{"params": each, "weight_decay": 0.0 if alone else 0.1} for alone, each in groups.items()]
    return AdamW(found, lr=0.01, eps=1e-4) if KINDS[kind].adam else SGD(found, lr=0.01, momentum=0.9)


@cache
def batches(kind: str, row_groups: int, step: int) -> tuple[Batch, ...]:
    """The whole micro-batches of a step: one or two, with targets left out here and there, and in the last one of some
    steps everywhere. After the first step rows of some are shorter, and positions begin again within a row."""
    random, chosen, found = torch.Generator().manual_seed(100 + step), KINDS[kind], []
    for micro in range(1 + step % 2):
        shape = row_groups * (1 + chosen.rows) + (step + micro) % 3, chosen.context // (1 + (step + micro) % 2)
        tokens, targets = (torch.randint(chosen.size.vocabulary, shape, generator=random) for _ in range(2))
        targets[torch.rand(shape, generator=random) > 0.7] = IGNORED
        targets[0, 0] = 0
        if step % 4 == 3 and micro:
            targets.fill_(IGNORED)
        found.append((tokens, packed(*shape, random) if step else torch.arange(shape[1]).expand(shape), targets))
    return tuple(found)


def composed(implementation: Implementation, model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism over `tp`, and around it FSDP2 over `shard`, PyTorch's `replicate` over `dp`, or HSDP over
    both."""
    parallel = implementation.watched(model, mesh["tp"])
    axes = tuple(name for name in ("dp", "shard") if name in (mesh.mesh_dim_names or ()))
    wrap = replicate if axes == ("dp",) else fully_shard
    for module in [*find_blocks(parallel), parallel] if axes else ():
        wrap(module, mesh=mesh[axes])  # type: ignore[operator]
    return parallel


def compiled(implementation: Implementation, backend: str, model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism whose layers are compiled."""
    parallel = composed(implementation, model, mesh)
    for block in find_blocks(parallel):
        block.compile(backend=backend)
    return parallel


def _recomputed(model: Any, batch: Batch) -> Tensor:
    return checkpoint(model, *batch, use_reentrant=False)


def train_on_rank(
    implementation: Implementation,
    mesh: Mesh,
    kind: str,
    device: str,
    steps: int,
    recomputes: bool = False,
    backend: str | None = None,
) -> Trace:
    """Layers are compiled by the backend."""
    if backend:
        torch._dynamo.reset()
    parallelize = partial(compiled, implementation, backend) if backend else partial(composed, implementation)
    trainer = MeshTrainer(
        parallelize,  # type: ignore[arg-type]
        partial(model_of, kind, device),
        partial(optimizer_of, kind),
        mesh.device_mesh(torch.device(device).type),
        max_norm=MAX_NORM,
        objective=Objective(losses=_recomputed) if recomputes else TOKENS,
    )
    found = traced(trainer, partial(own_batches, mesh, device, of=partial(batches, kind)), steps)
    if backend:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return found


@cache
def in_one_process(row_groups: int, kind: str, steps: int) -> Trace:
    trainer = OneProcess(partial(model_of, kind, "cpu"), partial(optimizer_of, kind), None, max_norm=MAX_NORM)
    return train(trainer, partial(batches, kind, row_groups), range(steps), MAX_NORM)

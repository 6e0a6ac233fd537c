"""Whole training steps of `training_steps.csv`: a decoder, how it is sharded, its dtypes and its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardmark.predict.simulation.schedule import Mark
from studies.published.decoders import Decoder, DecoderSize, loss_of


@dataclass(frozen=True)
class Training:
    """A step of a decoder. All batches have `length` tokens a row; `batch` rows are one rank's micro-batch."""

    size: DecoderSize
    length: int
    batch: int
    micro_batches: int
    strategy: str
    """ "one GPU", "ddp", "fsdp1", "hsdp" or "fsdp2"."""
    ranks: int
    per_node: int
    master: torch.dtype
    """Dtype of the parameters that the optimizer updates."""
    reduce: torch.dtype
    """Dtype of the gradients' reduction."""
    compute: torch.dtype = torch.bfloat16
    checkpoint_every: int = 0
    """1: every block is recomputed in backward; 2: every second one, and so on; 0: none."""
    saves_operators: bool = False
    """Recomputed blocks keep attention's results and those of every second product, as torchtitan's do."""
    compiled: bool = False
    """Whether it is compiled: here, each block by itself."""
    optimizer: str = "foreach"
    """ "foreach", "fused", or "loop" (a loop over the parameters)."""
    autocast: bool = False
    """Under autocast; otherwise parameters are cast as they are gathered."""
    clips: bool = True
    """Whether gradients are clipped by their norm."""
    prefetch_late: bool = False
    """FSDP1's BACKWARD_POST."""
    reshard: bool = True
    """Whether FSDP2 frees parameters after forward."""
    sync_last_only: bool = False
    """Whether only the last micro-batch reduces gradients."""
    iteration: bool = False
    """The published time is that of the last micro-batch, with the optimizer."""

    @property
    def tokens(self) -> int:
        """Tokens that a rank takes in a step."""
        return self.length * self.batch * (1 if self.iteration else self.micro_batches)


def made(training: Training) -> Callable[[Mark], None]:
    """The step of that training, inside a simulation; its optimizer has its state already."""
    with default_dtype(training.master):
        model: Any = _wrapped(training, Decoder(training.size, training.length))
    optimizer = optimizer_of(training, model)
    tokens, targets = torch.zeros(2, training.batch, training.length, dtype=torch.long)

    def step(mark: Mark) -> None:
        for number in range(training.micro_batches):
            last = number == training.micro_batches - 1
            with syncing(training, model, last):
                with torch.autocast("cpu", training.compute) if training.autocast else nullcontext():
                    loss = loss_of(model, tokens, targets)
                loss.backward()
            del loss
        if training.clips:
            clip(training, model)
        optimizer.step()
        optimizer.zero_grad()
        mark("step")

    step(lambda part, of_host=False: None)
    return step


class default_dtype(AbstractContextManager[None]):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.before)


def _wrapped(training: Training, model: Decoder) -> nn.Module:
    checkpoint_blocks(training, model.blocks)
    if training.compiled:
        for block in model.blocks:
            block.compile()
    if training.strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if training.strategy in ("fsdp1", "hsdp"):
        return _fsdp1(training, model)
    if training.strategy == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=training.compute, reduce_dtype=training.reduce)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=training.reshard)
        fully_shard(model, mp_policy=policy, reshard_after_forward=training.reshard)
    return model


def checkpoint_blocks(training: Training, blocks: nn.ModuleList) -> None:
    """Have backward recompute the blocks that the training says."""
    every = training.checkpoint_every
    for index, block in enumerate(blocks):
        if every and index % every == every - 1:
            options = {"context_fn": _saving_operators} if training.saves_operators else {}
            blocks[index] = checkpoint_wrapper(block, **options)


def _saving_operators() -> Any:
    """Contexts of a block that keeps attention's results and those of every second product."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name.partition("::")[2]
        if name == "mm":
            products[context.is_recompute] += 1
        saved = "scaled_dot_product" in name or (name == "mm" and products[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _fsdp1(training: Training, model: Decoder) -> nn.Module:
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(training.compute, training.reduce, training.compute),
        "device_id": torch.device("cpu"),
        "limit_all_gathers": True,
    }
    if training.prefetch_late:
        options["backward_prefetch"] = BackwardPrefetch.BACKWARD_POST
    if training.strategy == "hsdp":
        nodes = training.ranks // training.per_node
        options["device_mesh"] = init_device_mesh("cpu", (nodes, training.per_node), mesh_dim_names=("node", "rank"))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def syncing(training: Training, model: Any, last: bool) -> AbstractContextManager[Any]:
    """The block of a micro-batch, in which gradients are reduced or not."""
    syncs = last or not training.sync_last_only
    if training.strategy == "fsdp2":
        model.set_requires_gradient_sync(syncs)
    return nullcontext() if syncs or training.strategy in ("fsdp2", "one GPU") else model.no_sync()


def clip(training: Training, model: Any) -> None:
    """Clip gradients by their norm over all ranks."""
    if training.strategy in ("fsdp1", "hsdp"):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def optimizer_of(training: Training, model: nn.Module) -> Optimizer:
    """AdamW, as the training has it."""
    if training.optimizer == "loop":
        return torch.optim.AdamW(model.parameters(), foreach=False)
    return torch.optim.AdamW(model.parameters(), fused=training.optimizer == "fused" or None)


def with_layers(training: Training, layers: int, micro_batches: int) -> Training:
    """The same training of a model with so many layers, and so many micro-batches a step."""
    return replace(training, size=replace(training.size, layers=layers), micro_batches=micro_batches)


LAYERS = 4, 6
"""Layers of the models that are recorded for a deeper one: beyond them each layer adds the same."""


def corners(training: Training) -> list[Training]:
    """The trainings that are recorded for this one: few layers, and one micro-batch or two."""
    layers = [min(each, training.size.layers) for each in LAYERS]
    return [
        with_layers(training, each, micro_batches)
        for each in dict.fromkeys(layers)
        for micro_batches in range(1, min(training.micro_batches, 2) + 1)
    ]

"""Whole training steps whose memory was published, written as their sources write them.

The trainings of `studies.published.training` are one decoder for all sources, which is enough for seconds. Bytes depend
on more: which norm saves float32, who holds the logits in backward, which gradients stay whole between micro-batches.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

from shardmark.meter.recording import mark
from studies.published.decoders import DecoderSize, WideRMSNorm, normalized
from studies.published.programs import Program
from studies.published.sequence_parallel import clip_each_mesh, cut
from studies.published.training import Training, checkpoint_blocks, clip, default_dtype, optimizer_of, syncing


@dataclass(frozen=True)
class Written:
    """A training, and what its memory depends on besides."""

    training: Training
    norm: type[WideRMSNorm]
    """RMSNorm, written out, which saves its input in float32."""
    float32_logits: str
    """Float32 logits are made by the "model", which returns them, by the "loss", which frees them, or by none ("")."""
    keeps_logits: bool
    """Whether the loop holds the logits until the next ones are there."""
    cuts_heads: bool = False
    """Whether queries, keys and values are one product, cut and joined again, as litgpt's."""
    keeps_last: bool = False
    """Whether FSDP2 keeps the last block's parameters after forward, which backward needs first."""
    keeps_root: bool = False
    """Whether FSDP2 keeps the root's, as it did whatever the argument, before `reshard_after_forward=None`."""
    on_reduce_stream: bool = False
    """Whether FSDP2 allocates a reduce-scatter's input on its stream, as before pytorch/pytorch#129721."""
    positions: int = 0
    """How many positions the table of rotations has, where more than the training's length."""
    from_meta: bool = False
    """Whether parameters are made as shards, and never whole."""
    tensor_parallel: int = 1
    """Ranks that each product is cut over, with the sequence between them; FSDP2 shards over the others."""
    compiles: str = ""
    """Each of the "blocks" is compiled, with its checkpoint, or the "model" once it is sharded, or nothing ("")."""


class HoldingRMSNorm(WideRMSNorm):
    """Its input in float32 lives until its result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return normalized(wide).type_as(x) * self.weight


class WiderRMSNorm(WideRMSNorm):
    """Its product with the weight is in float32 too."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (normalized(wide) * self.weight).type_as(x)


class _Attention(nn.Module):
    def __init__(self, size: DecoderSize, cuts_heads: bool) -> None:
        super().__init__()
        self.size, self.head, self.cuts_heads = size, size.width // size.heads, cuts_heads
        linear = partial(nn.Linear, bias=False)
        key = self.head * size.kv_heads
        if cuts_heads:
            self.qkv = linear(size.width, size.width + 2 * key)
        else:
            self.query = linear(size.width, size.width)
            self.key, self.value = linear(size.width, key), linear(size.width, key)
        self.output = linear(size.width, size.width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (self._cut if self.cuts_heads else self._apart)(x, table)
        return self.output(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def _apart(self, x: Tensor, table: Tensor) -> list[Tensor]:
        """Rotated as complex numbers; key and value heads are repeated."""
        q, k, v = (one(x).unflatten(-1, (-1, self.head)) for one in (self.query, self.key, self.value))
        # Lists and no generators: in its source both complex tensors live until both are float32, and so these.
        pairs = [torch.view_as_complex(one.float().unflatten(-1, (-1, 2))) for one in (q, k)]
        wide = [torch.view_as_real(one * table[:, None]).flatten(3) for one in pairs]
        q, k = (one.type_as(v) for one in wide)
        times = self.size.heads // self.size.kv_heads
        if times > 1:
            k, v = (one.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3) for one in (k, v))
        return [one.transpose(1, 2) for one in (q, k, v)]

    def _cut(self, x: Tensor, table: Tensor) -> list[Tensor]:
        """Rotated in halves; the part that litgpt leaves as it is, and joins again, is empty."""
        batch, length, _ = x.shape
        kv, times = self.size.kv_heads, self.size.heads // self.size.kv_heads
        cut = self.qkv(x).view(batch, length, kv, times + 2, self.head).permute(0, 2, 3, 1, 4)
        q, k, v = cut.split((times, 1, 1), 2)
        k, v = (one.expand(-1, -1, times, -1, -1) for one in (k, v))
        q, k, v = (one.reshape(batch, -1, length, self.head) for one in (q, k, v))
        return [*(torch.cat([_rotated(one, table), one[..., self.head :]], -1) for one in (q, k)), v]


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * table.real + torch.cat([-second, first], -1) * table.imag).type_as(x)


class _FeedForward(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, written: Written) -> None:
        super().__init__()
        size = written.training.size
        self.norm_1, self.norm_2 = written.norm(size.width), written.norm(size.width)
        self.attention = _Attention(size, written.cuts_heads)
        self.feed_forward = _FeedForward(size)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), table)
        return x + self.feed_forward(self.norm_2(x))


class _Decoder(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocab)."""

    table: Tensor

    def __init__(self, written: Written) -> None:
        super().__init__()
        size = written.training.size
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(_Block(written) for _ in range(size.layers))
        self.norm = written.norm(size.width)
        self.output = nn.Linear(size.width, size.vocab, bias=False)
        head = size.width // size.heads
        positions = written.positions or written.training.length
        table = torch.empty(positions, head if written.cuts_heads else head // 2, dtype=torch.complex64)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table[: tokens.shape[1]])
        return self.output(self.norm(x))


@cache
def program(written: Written) -> Program:
    """Two steps, so that the optimizer has its state in the second."""

    training = written.training

    def steps() -> None:
        model = _made(written)
        optimizer = optimizer_of(training, model)
        logits = None
        for _ in range(2):
            for number in range(training.micro_batches):
                tokens, targets = torch.zeros(2, training.batch, training.length, dtype=torch.long)
                with syncing(training, model, number == training.micro_batches - 1):
                    logits = model(tokens)
                    if written.float32_logits == "model":
                        logits = logits.float()
                    wide = logits.float() if written.float32_logits == "loss" else logits
                    loss = cross_entropy(wide.flatten(0, 1), targets.flatten())
                    del wide
                    if not written.keeps_logits:
                        logits = None
                    loss.backward()
            if training.clips and written.tensor_parallel > 1:
                clip_each_mesh(model)
            elif training.clips:
                clip(training, model)
            optimizer.step()
            optimizer.zero_grad()
        mark("done")

    return steps


def _made(written: Written) -> Any:
    model = _sharded(written)
    if written.compiles == "model":
        model.compile()
    return model


def _sharded(written: Written) -> Any:
    training = written.training
    with default_dtype(training.master), torch.device("meta") if written.from_meta else nullcontext():
        model = _Decoder(written)
    mesh = None
    if written.tensor_parallel > 1:
        both = init_device_mesh(
            "cpu", (training.ranks // written.tensor_parallel, written.tensor_parallel), mesh_dim_names=("fsdp", "tp")
        )
        cut(model, both["tp"])
        mesh = both["fsdp"]
    checkpoint_blocks(training, model.blocks)
    if written.compiles == "blocks":
        for block in model.blocks:
            block.compile()
    if training.strategy == "ddp":
        return DistributedDataParallel(model)
    if training.strategy == "fsdp1":
        return _fsdp1(written, model)
    if training.strategy == "fsdp2":
        policy = MixedPrecisionPolicy(training.compute, training.reduce)
        for number, block in enumerate(model.blocks, 1):
            keeps = written.keeps_last and number == len(model.blocks)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not written.keeps_root)
        if written.on_reduce_stream:
            reduce_scatter = _OnReduceStream(model)
            for unit in (model, *model.blocks):
                unit.set_custom_reduce_scatter(reduce_scatter)
        if written.from_meta:
            model.to_empty(device="cpu")
    return model


class _OnReduceStream(DefaultReduceScatter):
    """Allocates on the stream of reduce-scatters, which a simulation has among those of the CPU."""

    def __init__(self, model: Any) -> None:
        self.state = model._get_fsdp_state()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cpu.stream(self.state._comm_ctx.reduce_scatter_stream):
            return super().allocate(size, dtype=dtype, device=device)


def _fsdp1(written: Written, model: _Decoder) -> FullyShardedDataParallel:
    training = written.training
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(training.compute, training.reduce, training.compute),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    if written.from_meta:
        options["param_init_fn"] = _materialized
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def _materialized(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)

"""Whole training steps whose memory was published, written as their sources write them.

The trainings of `studies.published.training` are one decoder for all sources, which is enough for seconds. Bytes depend
on more: which norm saves float32, who holds the logits in backward, which gradients stay whole between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

from shardmark.meter.recording import mark
from studies.published.decoders import DecoderSize, WideRMSNorm
from studies.published.programs import Program
from studies.published.training import default_dtype, saving_operators

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Written:
    """A training step and what its memory depends on."""

    size: DecoderSize
    length: int
    batch: int
    ranks: int
    strategy: str
    """ "one GPU", "ddp", "fsdp1" or "fsdp2"."""
    master: torch.dtype
    """Dtype of the parameters that the optimizer updates."""
    reduce: torch.dtype
    """Dtype of the gradients' reduction."""
    norm: type[nn.Module]
    """RMSNorm: PyTorch's, which saves its input, or one written out, which saves it in float32."""
    float32_logits: str
    """Float32 logits are made by the "model", which returns them, by the "loss", which frees them, or by none ("")."""
    keeps_logits: bool
    """Whether the loop holds the logits until the next ones are there."""
    cuts_heads: bool = False
    """Whether queries, keys and values are one product, cut and joined again, as litgpt's."""
    checkpoints: str = ""
    """Recomputed in backward: nothing, each block ("full"), or its "operators" but attention and every second
    product."""
    micro_batches: int = 1
    syncs_last_only: bool = False
    """Whether gradients are reduced in the last micro-batch alone."""
    keeps_last: bool = False
    """Whether FSDP2 keeps the last block's parameters after forward, which backward needs first."""
    keeps_root: bool = False
    """Whether FSDP2 keeps the root's, as it did whatever the argument, before `reshard_after_forward=None`."""
    from_meta: bool = False
    """Whether parameters are made as shards, and never whole."""
    clips: bool = True
    fused: bool = False


class WiderRMSNorm(WideRMSNorm):
    """Its product with the weight is in float32 too."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight).type_as(x)


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
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.float().unflatten(-1, (-1, 2))) * table[:, None])
            .flatten(3)
            .type_as(one)
            for one in (q, k)
        )
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


class _Block(nn.Module):
    def __init__(self, written: Written) -> None:
        super().__init__()
        width, ffn = written.size.width, written.size.ffn_width
        self.norm_1, self.norm_2 = written.norm(width), written.norm(width)
        self.attention = _Attention(written.size, written.cuts_heads)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), table)
        wide = self.norm_2(x)
        return x + self.down(silu(self.gate(wide)) * self.up(wide))


class _Decoder(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocab)."""

    table: Tensor

    def __init__(self, written: Written) -> None:
        super().__init__()
        size = written.size
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(_Block(written) for _ in range(size.layers))
        self.norm = written.norm(size.width)
        self.output = nn.Linear(size.width, size.vocab, bias=False)
        head = size.width // size.heads
        table = torch.empty(written.length, head if written.cuts_heads else head // 2, dtype=torch.complex64)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.output(self.norm(x))


@cache
def program(written: Written) -> Program:
    """Two steps, so that the optimizer has its state in the second."""

    def steps() -> None:
        model = _made(written)
        optimizer = torch.optim.AdamW(model.parameters(), fused=written.fused or None)
        logits = None
        for _ in range(2):
            for number in range(written.micro_batches):
                tokens, targets = torch.zeros(2, written.batch, written.length, dtype=torch.long)
                with _syncing(written, model, number == written.micro_batches - 1):
                    logits = model(tokens)
                    if written.float32_logits == "model":
                        logits = logits.float()
                    wide = logits.float() if written.float32_logits == "loss" else logits
                    loss = cross_entropy(wide.flatten(0, 1), targets.flatten())
                    del wide
                    if not written.keeps_logits:
                        logits = None
                    loss.backward()
            if written.clips:
                _clip(written, model)
            optimizer.step()
            optimizer.zero_grad()
        mark("done")

    return steps


def _made(written: Written) -> Any:
    with default_dtype(written.master), torch.device("meta") if written.from_meta else nullcontext():
        model = _Decoder(written)
    if written.checkpoints:
        options: dict[str, Any] = {"context_fn": saving_operators} if written.checkpoints == "operators" else {}
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, **options)
    if written.strategy == "ddp":
        return DistributedDataParallel(model)
    if written.strategy == "fsdp1":
        return _fsdp1(written, model)
    if written.strategy == "fsdp2":
        policy = MixedPrecisionPolicy(BF16, written.reduce)
        for number, block in enumerate(model.blocks, 1):
            keeps = written.keeps_last and number == len(model.blocks)
            fully_shard(block, mp_policy=policy, reshard_after_forward=not keeps)
        fully_shard(model, mp_policy=policy, reshard_after_forward=not written.keeps_root)
        if written.from_meta:
            model.to_empty(device="cpu")
    return model


def _fsdp1(written: Written, model: _Decoder) -> FullyShardedDataParallel:
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(BF16, written.reduce, BF16),
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


def _syncing(written: Written, model: Any, last: bool) -> AbstractContextManager[Any]:
    if last or not written.syncs_last_only or written.strategy == "one GPU":
        if written.strategy == "fsdp2":
            model.set_requires_gradient_sync(True)
        return nullcontext()
    if written.strategy == "fsdp2":
        model.set_requires_gradient_sync(False)
        return nullcontext()
    no_sync: Callable[[], AbstractContextManager[Any]] = model.no_sync
    return no_sync()


def _clip(written: Written, model: Any) -> None:
    if written.strategy == "fsdp1":
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

"""Full sharding in closed form: bytes at the peak of one rank's training step, and bytes it must send.

Units are the blocks, the embedding, the output projection, and the whole with its final norm. Everything is that of the
language model's step, but that parameters, their gradients and moments are a rank's part of them, and that full ones
are there for the units at hand: gathered, gathered ahead, their gradients, and the gradients on their way before those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from impl.accounting.model import activations, training_work
from impl.model.sizes import SIZES
from shardmark.cases import FSDPCase, Work

_FLOAT = 4  # bytes of a float32, which shards, their gradients and moments are
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class _Units:
    """Elements of each unit, padded to a multiple of the ranks."""

    embedding: int
    block: int
    output: int
    root: int
    blocks: int

    @property
    def total(self) -> int:
        return self.embedding + self.blocks * self.block + self.output + self.root


def _units(case: FSDPCase) -> _Units:
    size = SIZES[case.model]
    table = size.vocab * size.d_model
    block = 4 * size.d_model**2 + 3 * size.d_model * size.d_ff + 2 * size.d_model
    table, block, root = (-(-n // case.ranks) * case.ranks for n in (table, block, size.d_model))
    return _Units(table, block, table, root, blocks=size.layers)


def sharded_peak(case: FSDPCase, kept: bool = False, prefetch: int = 1) -> int:
    """Peak in bytes; `kept` where units stay gathered after forward, `prefetch` how many are gathered ahead."""
    return max(moments(case, kept, prefetch).values())


def moments(case: FSDPCase, kept: bool = False, prefetch: int = 1) -> dict[str, int]:
    """Bytes live at each of the moments that may be the peak."""
    size, units, n = SIZES[case.model], _units(case), case.ranks
    c = _BYTES[case.dtype]  # of what is gathered, computed and reduced
    tokens = case.tokens
    narrow, wide, logits = (c * tokens * width for width in (size.d_model, size.d_ff, size.vocab))
    rotary, counters = _FLOAT * case.context * size.head_dim, _FLOAT * (3 + 9 * size.layers)
    shards = _FLOAT * units.total // n
    static = 3 * shards + counters + rotary + 16 * tokens + c * units.root  # the whole's own stay gathered
    kept_activations = activations(size, case.batch, case.context)
    layer = sum(nbytes for (where, _), nbytes in kept_activations.items() if where.startswith("blocks"))
    layer = layer // size.layers * c // _FLOAT
    block, output, embedding = c * units.block, c * units.output, c * units.embedding
    forward = static + sum(kept_activations.values()) * c // _FLOAT
    forward += embedding + size.layers * block + output if kept else 0

    def reducing(unit: int) -> int:
        """A unit's gradients on their way, with the parts that a reduce-scatter around a ring receives."""
        return unit + min(2, n - 1) * unit // n

    def gathered(*units: int) -> int:
        return 0 if kept else sum(units[: 1 + prefetch])

    at_output = forward + narrow + output + gathered(output, block)
    # What the loss and the final norm kept is gone by the last block, and so is the last sum.
    gate = c * size.d_model * size.d_ff
    in_block = forward - (logits + 2 * narrow + c * tokens) - (output if kept else 0) + block + gate + 2 * wide
    ahead = [block] * min(size.layers, 1 + prefetch)
    next_block = in_block - layer - (block if kept else 0) + _FLOAT * units.output // n
    more = max(0, (size.layers - 2) * (_FLOAT * units.block // n - layer - (block if kept else 0)))
    last = static + (embedding if kept else 0) + embedding + shards - _FLOAT * (units.embedding + units.root) // n
    return {
        "loss": forward + 2 * logits,
        "output": at_output,
        # A gradient that padding follows is copied.
        "output copied": at_output + (output - logits - narrow if size.vocab * size.d_model % n else 0),
        "last block": in_block + reducing(output) + gathered(*ahead),
        "other blocks": next_block + more + reducing(block) + gathered(*ahead[: size.layers - 1]),
        "embedding": last - _FLOAT * units.block // n + reducing(block) + narrow + 2 * c,
        "last reduction": last + max(reducing(embedding) - embedding, _FLOAT * units.embedding // n) + 2 * c,
    }


def kept_peak(case: FSDPCase) -> int:
    """Peak in bytes where units stay gathered after forward."""
    return sharded_peak(case, kept=True)


def plain_peak(case: FSDPCase) -> int:
    """Peak in bytes where nothing is gathered ahead."""
    return sharded_peak(case, prefetch=0)


def work(case: FSDPCase, kept: bool = False) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send.

    Parameters are gathered for forward and, unless they are kept, for backward, all but the embedding's, whose gradient
    does not read it, and the whole's own; gradients are reduced once: (n-1)/n of their bytes each time.
    """
    one, units = training_work(case), _units(case)
    again = 0 if kept else units.blocks * units.block + units.output
    sent = (2 * units.total + again) * _BYTES[case.dtype] * (case.ranks - 1) // case.ranks
    return replace(
        one,
        flops=case.ranks * one.flops,
        model_flops=case.ranks * one.model_flops,
        bytes_moved=case.ranks * one.bytes_moved,
        bytes_communicated=sent,
    )

"""The step of an MLP of square linears in closed form: bytes at the peak of one rank, and what it computes and sends.

Peaks lie in backward. A = bytes of one layer's activations, u = bytes of one linear, weight and bias; when backward
comes to layer i of L, counted from the input, the gradients of the L - i behind it are there. A ReLU's backward holds
the i results that are still to be read, the gradient that came and the one that goes; a linear's holds one result less,
and its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from impl.accounting.collectives import all_reduce_bytes_sent
from shardmark.cases import NineLinearsCase, Work

_FLOAT = 4  # bytes of a float32
_LOSS = 8  # and its gradient


def activation_bytes(case: NineLinearsCase) -> int:
    """A: what a layer hands on."""
    return _FLOAT * case.batch * case.width


def linear_bytes(case: NineLinearsCase) -> int:
    """u: weight and bias of one linear."""
    return _FLOAT * (case.width**2 + case.width)


def ddp_peak(case: NineLinearsCase) -> int:
    """Peak in bytes of torch DDP: parameters, buckets as large, and gradients that are not in them."""
    a, u, layers = activation_bytes(case), linear_bytes(case), case.linears
    moments = [
        moment
        for i, relu, linear, _ in _backward(case)
        for moment in (relu + (layers - i) * u, linear + (layers - i + 1) * u)
    ]
    return a + 2 * layers * u + _LOSS + max(moments)


def fsdp1_peak(case: NineLinearsCase, backward_prefetch: str | None = "pre") -> int:
    """Peak in bytes of torch FSDP1, a unit for each linear.

    A unit's gradients are copied into a flat one while it is still gathered; to reduce that, Gloo copies it once more.
    Gathered ahead, the next unit is there from before its own gradients are computed ("pre") or after them ("post").
    """
    u, shard = linear_bytes(case), _shard(case)
    moments = []
    for i, relu, linear, left in _backward(case):
        ahead = u if i > 1 else 0
        before, after = (ahead if backward_prefetch in when else 0 for when in (("pre",), ("pre", "post")))
        gathered = u if backward_prefetch is not None and i < case.linears else 0
        held = (case.linears - i) * shard
        moments += [
            held + relu + gathered,
            held + linear + 2 * u + before,
            held + left + 3 * u + before,
            held + left + 2 * u + shard + after,
        ]
    return _sharded_model(case) + max(moments)


def fsdp2_peak(case: NineLinearsCase, reshard_after_forward: bool = True) -> int:
    """Peak in bytes of torch FSDP2, a unit for each linear; the next is gathered before this one's gradients.

    To be reduced these are copied, and by Gloo once more; the first copy stays until the next unit's gradients are too.
    """
    u, shard = linear_bytes(case), _shard(case)
    moments = []
    for i, relu, linear, left in _backward(case):
        held = (case.linears - i) * shard
        copied = u if i < case.linears else 0
        ahead = (u if i > 1 else 0) if reshard_after_forward else (i - 1) * u
        gathered = copied if reshard_after_forward else i * u
        moments += [
            held + relu + gathered + copied,
            held + linear + 2 * u + ahead + copied,
            held + left + 2 * u + shard + ahead,
        ]
    return _sharded_model(case) + max(moments)


FSDP_PEAKS: dict[str, Callable[[NineLinearsCase], int]] = {
    "fsdp1": fsdp1_peak,
    "fsdp1_post": partial(fsdp1_peak, backward_prefetch="post"),
    "fsdp1_no_prefetch": partial(fsdp1_peak, backward_prefetch=None),
    "fsdp2": fsdp2_peak,
    "fsdp2_kept": partial(fsdp2_peak, reshard_after_forward=False),
}
"""By the names of the family's implementations."""


def work(case: NineLinearsCase, gathered_again: bool) -> Work:
    """All ranks' FLOPs and least bytes, and what each rank must send.

    Three products a linear, but for the gradient of what goes into the first; weights read twice, gradients written,
    and both read and one written by SGD. Shards that are not kept whole are gathered again for backward.
    """
    parameters = case.linears * linear_bytes(case)
    flops = 2 * case.batch * case.width**2 * (3 * case.linears - 1)
    once = all_reduce_bytes_sent(parameters, case.ranks) // 2  # a gather, or a reduction to shards
    return Work(
        flops=case.ranks * flops,
        bytes_moved=case.ranks * 6 * parameters,
        bytes_communicated=(3 if gathered_again else 2) * once,
        model_flops=case.ranks * flops,
    )


def _backward(case: NineLinearsCase) -> Iterator[tuple[int, int, int, int]]:
    """(i, activations held in ReLU i's backward, in linear i's, after it), from the last layer to the first."""
    a = activation_bytes(case)
    for i in range(case.linears, 0, -1):
        into = a if i > 1 else 0  # the first layer's input needs no gradient
        yield i, (i + 2) * a, i * a + into, (i - 1) * a + into


def _shard(case: NineLinearsCase) -> int:
    """One rank's part of a linear."""
    return -(-linear_bytes(case) // (_FLOAT * case.ranks)) * _FLOAT


def _sharded_model(case: NineLinearsCase) -> int:
    """What is there at any time: data, all shards of parameters, the loss."""
    return activation_bytes(case) + case.linears * _shard(case) + _LOSS

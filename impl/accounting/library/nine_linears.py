"""The step of an MLP of square linears in closed form: bytes on one rank, and what the step computes and sends.

The peak is in backward, which is followed here allocation by allocation, exact to the byte on CPU and Gloo but for
scalars, on a rank that has the most rows. A = bytes of one layer's activations, u = bytes of one linear, weight and
bias. Forward leaves the L - 1 results of ReLUs, the output and the loss, whose storage PyTorch's mean squared error
makes as large as the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from impl.accounting.library.linear_units import FSDP1, FSDP2, Replicated, Sharded, Sharding, Simple
from impl.accounting.programs.parameters import FLOAT
from impl.collectives.accounting import all_reduce_bytes_sent
from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.fsdp.cases import NineLinearsCase


def activation_bytes(case: NineLinearsCase) -> int:
    """A: what a layer hands on."""
    return FLOAT * case.batch * case.width


def linear_bytes(case: NineLinearsCase) -> int:
    """u: weight and bias of one linear."""
    return FLOAT * (case.width**2 + case.width)


def stages(case: NineLinearsCase, sharding: Callable[..., Sharding] = Replicated) -> dict[str, int]:
    """Bytes live after each stage of making the step. In the end the gradients are there, and no activations."""
    data, model, held = 2 * activation_bytes(case), case.linears * linear_bytes(case), sharding(case)
    return {
        "data": data,
        "model": data + model,
        "wrapping": data + held.kept,
        "warm-up": data + held.kept + held.kept_gradients,
    }


def peak(case: NineLinearsCase, sharding: Callable[..., Sharding] = Replicated, device: str = "cpu") -> int:
    """Peak in bytes of one rank's step, on the device: what is offloaded from "cuda" is not on it."""
    held = sharding(case, device=device)
    take, give = held.take, held.give
    a, layers, per_unit = activation_bytes(case), case.linears, case.linears_a_unit
    held.begin()
    take(2 * a, (layers - 1) * a, 2 * a)
    take(FLOAT, a)  # gradients of the loss and of the output
    for i in range(layers, 0, -1):
        unit, last = -(-i // per_unit), i % per_unit == 0
        if last and per_unit > 1:
            held.before(unit)
        if i < layers:  # a ReLU, whose result goes then
            take(a)
            give(2 * a)
        if last and per_unit == 1:  # a linear that is a unit alone is one without its ReLU
            held.before(unit)
        take(a if i > 1 else 0)
        held.compute()
        give(a)
        held.collect()
        if (i - 1) % per_unit == 0:
            held.after(unit)
    held.finish()
    return held.ledger.peak


SHARDINGS: dict[str, Callable[..., Sharding]] = {
    "ddp": Replicated,
    "sharded_plain": partial(Sharded, ahead=0),
    "sharded": Sharded,
    "sharded_kept": partial(Sharded, kept=True),
    "simple": Simple,
    "fsdp1": FSDP1,
    "fsdp1_post": partial(FSDP1, backward_prefetch="post"),
    "fsdp1_no_prefetch": partial(FSDP1, backward_prefetch=None),
    "fsdp1_forward_prefetch": partial(FSDP1, forward_prefetch=True),
    "fsdp2": FSDP2,
    "fsdp2_kept": partial(FSDP2, kept=True),
    "accelerate": FSDP2,  # there is no norm, which it would make a unit
}
"""By the names of implementations."""


def work(case: NineLinearsCase, gathered_again: int) -> Work:
    """All ranks' FLOPs and least bytes, and what each rank must send.

    Three products a linear, but for the gradient of what goes into the first; weights read twice, gradients written,
    and both read and one written by SGD. So many linears are `gathered_again` for backward.
    """
    parameters = case.linears * linear_bytes(case)
    flops = 2 * case.batch * case.width**2 * (3 * case.linears - 1)
    once = all_reduce_bytes_sent(parameters, case.ranks) // 2  # a gather, or a reduction to shards
    return Work(
        flops=case.ranks * flops,
        bytes_moved=case.ranks * 6 * parameters,
        bytes_communicated=2 * once + once * gathered_again // case.linears,
        model_flops=case.ranks * flops,
    )

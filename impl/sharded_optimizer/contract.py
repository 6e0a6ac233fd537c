"""The contract of sharded optimizers: what a user calls, the check of a target, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch

from impl.sharded_optimizer.accounting import balanced_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class ShardedOptimizerContract(Protocol):
    """`ShardedOptimizer(params, optimizer_cls, *, process_group=None, **defaults)`, a real `torch.optim.Optimizer`.

    Every rank gives the same parameters, with the same values, and gradients that are averaged already, as any
    data-parallel wrapper leaves them. After `step`, parameters are those of `optimizer_cls(params, **defaults)`, on
    every rank. Parameters without a gradient are left alone, with their state. `param_groups` are as the user gave
    them, so that schedulers change `lr` there. Every rank must make the same calls.

    An option by name that an implementation may take: with `average_gradients=True` gradients are this rank's own, and
    the optimizer averages them itself, in backward; nobody else does. It has `finish_gradient_synchronization`,
    `finish_parameter_synchronization` and `no_sync` then. And `module`, whose next forward the exchange of updated
    parameters overlaps.
    """

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Update every parameter that has a gradient, on every rank."""
        ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time between steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """On every rank the whole state, as `optimizer_cls` would have it on one, whatever the number of ranks."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved on any number of ranks, or by `optimizer_cls`; ValueError where it does not fit."""
        ...


def _check(target: Any, device: str) -> None:
    """What can be told without ranks: the signature. The rest is the correctness tests' to find."""
    try:
        inspect.signature(target).bind([torch.ones(1)], torch.optim.SGD, process_group=None, lr=0.1)
    except TypeError as error:
        raise RegistryError(
            f"it is called as ShardedOptimizer(params, optimizer_cls, *, process_group=None, **defaults): {error}"
        ) from None
    if isinstance(target, type) and not issubclass(target, torch.optim.Optimizer):
        raise RegistryError(f"{target!r} is not a class of torch.optim.Optimizer")


FAMILY = add_family(
    Family(
        "sharded_optimizer",
        ShardedOptimizerContract,
        reference="unsharded",
        check=_check,
        memory=balanced_peak,  # a user's own is held to shards of equal size
        time=Race("zero_redundancy", budget=2.0),
    )
)

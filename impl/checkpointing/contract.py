"""The contract of activation checkpointing: what a user calls, the check of a target, and the family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from impl.checkpointing import accounting
from shardmark.registry import Family, Race, RegistryError, add_family


class Policy(Protocol):
    """`policy(model) -> model`: the same object, whose blocks from now on keep less for backward.

    `model.blocks` is an `nn.ModuleList` that the model's forward iterates over, each block taking the output of the one
    before. Gradients are bitwise those of the model as it was; the names in `state_dict` and what `isinstance` says do
    not change. The state of the random number generators is restored for a block that holds an `nn.Dropout`; one that
    draws random numbers by other means must not be checkpointed. A model that is checkpointed is saved by its
    `state_dict`: it cannot be pickled whole. ValueError for a model without blocks, and for one
    that is checkpointed already.
    """

    def __call__(self, model: nn.Module) -> nn.Module:
        """The model, checkpointed."""
        ...


def _check(target: Any, device: str) -> None:
    """A policy gives back the model with its parameters' names, and a block that still computes what it did."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; a policy is policy(model) -> model")
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    names = list(model.state_dict())
    if target(model.to(device)) is not model:
        raise RegistryError("it does not return the model that it was given")
    if list(model.state_dict()) != names or not all(
        isinstance(block, nn.Linear) for block in model.blocks._modules.values()
    ):
        raise RegistryError("it changes the names in the model's state_dict or the classes of its blocks")


FAMILY = add_family(
    Family(
        "checkpointing",
        Policy,
        reference="none",
        check=_check,
        memory=accounting.NONE.peak,  # a user's own keeps no more than everything
        time=Race("none"),
    )
)

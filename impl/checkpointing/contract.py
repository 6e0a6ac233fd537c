"""The contract of activation checkpointing, the check that a target meets it, and the family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from impl.checkpointing import accounting
from shardmark.api import Family, Race, RegistryError, add_family


class Policy(Protocol):
    """`policy(model) -> model`: the same object, whose blocks save less for backward from then on.

    `model.blocks` is an `nn.ModuleList` that the model's forward iterates over; each block takes the output of the
    one before, and perhaps further arguments, positional or by name, tensors or not, the same for all. Outputs and
    gradients are bitwise equal to those without checkpointing: those of parameters, of the input and of further
    arguments, by `backward()`, with `inputs=` too, and by `torch.autograd.grad`; under autocast in any of its dtypes
    and where it is disabled inside of autocast, whatever holds as backward runs (autocast, `no_grad`); in any dtype;
    in eval mode, and where each submodule has a mode of its own; where the input or some parameters need no gradient,
    where blocks share parameters (but for the order in which their gradients are summed; torch's selective
    checkpointing raises an error there, under autocast), and where several forwards come before the first backward.
    Parameters stay the same objects; their names in `state_dict` and what `isinstance` says do not change; forward
    hooks and pre-hooks of blocks run, and what they return counts, whether registered before the policy or later,
    until they are removed. For a block that holds one of torch's dropout modules, at any depth, backward restores the
    state of the random number generators, and leaves them as it found them; a block that draws random numbers in
    another way, changes its buffers in forward (as `nn.BatchNorm1d` does) or its input in place must not be
    checkpointed. Between a forward and its backward nothing that forward depends on may change, `train()` and
    `eval()` included; backward goes through a graph once.

    Of a model of many blocks forward keeps fewer bytes for backward than without and the peak of forward and backward
    is lower, in training and in eval mode, whichever parameters are frozen; nothing is kept after backward, after a
    forward without gradients, or once an output that never goes backward is gone. A policy which is to save nothing,
    as a peer, is named `none` or `identity`, or has an attribute `saves_nothing = True`.

    Save a checkpointed model by its `state_dict`; the module itself cannot be pickled. ValueError for a model without
    blocks, and for one that is checkpointed already.
    """

    def __call__(self, model: nn.Module) -> nn.Module: ...


def claims_to_save(policy: Any) -> bool:
    """Return True if tests hold the policy to saving memory: all policies except those that declare otherwise."""
    return not getattr(policy, "saves_nothing", False) and getattr(policy, "__name__", "") not in ("none", "identity")


def _check(target: Any, device: str) -> None:
    """Check that a policy returns the model it was given, with the same parameter names and block classes."""
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
        memory=accounting.NONE.peak,  # a user's own policy may save no more than all activations
        time=Race("none"),
    )
)

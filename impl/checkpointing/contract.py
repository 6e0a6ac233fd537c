"""The contract of activation checkpointing, the check that a target meets it, and the family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from impl.checkpointing import accounting
from shardmark.api import Family, Race, RegistryError, add_family


class Policy(Protocol):
    """`policy(model) -> model`: the same object, whose blocks save less for backward from then on.

    `model.blocks` is an `nn.ModuleList` that the model's forward iterates over. Each block takes the output of the
    one before, and perhaps further arguments, positional or by name, tensors or not, the same for all. Outputs and
    gradients (of parameters, of the input and of further arguments) are bitwise equal to those without
    checkpointing: by `backward()`, with `inputs=` too, and by `torch.autograd.grad`; in any dtype; under autocast
    in any of its dtypes, with autocast disabled inside of autocast, and whatever context backward runs in
    (autocast, `no_grad`); in eval mode, and if submodules have different modes; if the input or some parameters
    need no gradient; if blocks share parameters (up to the order in which their gradients are summed; torch's
    selective checkpointing raises an error there, under autocast); and if several forwards come before the first
    backward. Parameters stay the same objects; their names in `state_dict` and the classes of modules do not
    change. Forward hooks and pre-hooks of blocks run and may change inputs and outputs, whether registered before
    the policy or later, until they are removed. For a block that holds one of torch's dropout modules, at any
    depth, backward restores the state of the random number generators for the recomputation, and leaves them as it
    found them. A block that draws random numbers in another way, changes its buffers in forward (as
    `nn.BatchNorm1d` does) or changes its input in place must not be checkpointed. Between a forward and its
    backward nothing that forward depends on may change, including `train()` and `eval()`; backward goes through a
    graph once.

    For a model with many blocks, forward keeps fewer bytes for backward than without checkpointing, and the peak of
    forward and backward is lower: in training and in eval mode, whichever parameters are frozen. Nothing is kept
    after backward, after a forward without gradients, or once an output without a backward is freed. A policy that
    should save nothing, as a peer, is named `none` or `identity`, or has an attribute `saves_nothing = True`.

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

"""The contract of activation checkpointing, the check that a target meets it, and the family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from impl.checkpointing import accounting
from shardmark.api import Family, Race, RegistryError, add_family


class Policy(Protocol):
    """`policy(model) -> model`: the same object, whose blocks save less for backward from then on.

    `model.blocks` is an `nn.ModuleList` that the model's forward iterates over. Each block takes the output of the one
    before, and perhaps further arguments, positional or by name, the same for all. Outputs and arguments are tensors,
    tuples, lists, dicts and other objects that hold tensors or one another, or, beside tensors, others; a policy that
    does not take them raises an error in forward.

    Must:

    - Outputs and gradients (of parameters, the input and further arguments) are bitwise those without checkpointing
      (sums of those of a tensor that a block takes twice, and under autocast of a weight that several blocks or passes
      use, may be rounded in another order), in containers of their own classes, and None, not zeros, for what a loss
      does not reach: by `backward()`, with `inputs=` too, and by `torch.autograd.grad`; in any dtype, of complex
      arguments, under autocast in any of its dtypes, whatever context and thread backward runs in; in training and eval
      mode, and where submodules' modes differ; where the input or some parameters need no gradient, or the input has no
      rows; where several forwards come before their backwards, which run in either order, and other models' between
      them; under the caller's hooks of saved tensors; of a deep copy, and after weights were loaded or cast, or
      parameters or their memory replaced.
      An output that depends on nothing that needs a gradient may require one.
      Where gradients are differentiated, and by a second backward or one that reads a saved tensor twice, they are
      those, or an error is raised.
    - Dropout drops the same in the recomputation, also where it was put in later, and backward leaves the state of the
      random number generators as it found it, also where it raises an error.
    - Parameters stay the same objects; their names in `state_dict` and the classes of modules do not change; hooks of
      blocks run, and those of parameters once in a backward.
    - Forward keeps fewer bytes for backward than without, and the peak of forward and backward is lower, under autocast
      and in bfloat16 too, and where blocks take and return tensors, or tuples of them, by position or by name, or have
      dropout or hooks, of a deep copy too, and after parameters were replaced, or a forward or a backward raised; and
      no more where some are frozen. Nothing is kept after backward, after a forward without gradients, or once an
      output without a backward is freed, before the garbage collector runs too. A policy that should save nothing, as a
      peer, is named `none` or `identity`, or has an attribute `saves_nothing = True`.

    Should: ValueError for a model without blocks, and for one that is checkpointed already.

    Not asked: blocks that draw random numbers but by torch's dropout modules, change their buffers in forward (as
    `nn.BatchNorm1d` does) or change their input in place; changes of what forward depends on, `train()` among them,
    between a forward and its backward; pickling of the module.
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

"""The contract of sharded optimizers, the check that a target meets it, and the family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from impl.sharded_optimizer.accounting import balanced_peak, work
from shardmark.api import (
    Family,
    Race,
    Refusable,
    RegistryError,
    Work,
    add_family,
    check_signature,
    dtypes_in,
    other_dtypes,
    tensors_of,
)


class ShardedOptimizerContract(Protocol):
    """`ShardedOptimizer(params, optimizer_cls, *, process_group=None, **defaults)`, a real `torch.optim.Optimizer`.

    `params` are parameters or param groups, as torch's optimizers take them. Every rank of the process group passes the
    same parameters with the same values and averaged gradients, and makes the same calls.

    Must:

    - When `step` returns, the parameters on every rank are those of `optimizer_cls(params, **defaults)`, for an
      optimizer whose update of an element depends on that element's gradient and state and on its param group alone,
      into which the optimizer may write, as a count of steps. One that needs more (Adafactor, LBFGS, Muon) is right
      too, or refused with a ValueError; a gradient that is sparse is right, or an error. Hooks of the step run once.
    - A step leaves gradients as they are (but see below). A closure that raises leaves no trace, nor does a group or a
      state that is refused.
    - A parameter without a gradient keeps its value and state; parameters may be frozen and unfrozen between steps.
      They may be views of one memory, and be changed in place. A gradient may be infinite or NaN.
    - Any option that a scheduler or the user changes in `param_groups` holds from the next step on, or in the step
      whose closure sets it, also where it is a tensor that is filled in place. The caller's autocast changes neither
      averages nor updates, and no call the caller's random state.
    - The ranks share the state: each of n holds about 1/n of its bytes, and at most one parameter's more, for any
      dtypes and groups, whenever these are added or thawed, and after loading.
    - `state_dict` is the full state as `optimizer_cls` has it, with names of parameters, on every rank;
      `load_state_dict` takes one saved on any number of ranks or by `optimizer_cls`, in place of its own.
    - Ranks outside of the group take no part; several optimizers do not disturb one another.

    Should: ValueError for a parameter that is there already, and on every rank for a state that does not fit.

    Options of some: with `average_gradients=True` gradients are each rank's own, and the optimizer averages them during
    backward, in place of a wrapper, and may free them: one that a rank lacks counts as zero. It then has
    `finish_gradient_synchronization`, `finish_parameter_synchronization` and `no_sync`. With `module` the all-gather of
    updated parameters overlaps that module's next forward.
    """

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Update every parameter that has a gradient, on every rank. As torch's, it takes a closure, calls it once with
        gradients enabled, and returns its loss.
        """
        ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's: an option that it does not give is the default that the optimizer was made with.

        May be called at any time between steps. Parameters of earlier groups keep their state.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The full, unsharded state, as `optimizer_cls` has it on one rank; the same on every rank.

        State that is no tensor is included. A parameter that was never updated, or that has no elements, may
        have no state.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved on any number of ranks, or by `optimizer_cls`, and its options, in place of its own.

        It is loaded as `optimizer_cls.load_state_dict` does, in the same dtypes. ValueError on every rank where it has
        another number of groups, or any group another number of parameters, also where the totals agree.
        """
        ...


@dataclass(frozen=True)
class Facts:
    """Facts about a way to shard the optimizer that questions need, stated where it is registered."""

    work: Callable[[Any], Work] = work
    """Function from a case to its step's FLOPs and the bytes each rank must send."""
    wrapper: str = "bucketed"
    """The data-parallel wrapper that averages gradients for an optimizer that does not average them itself."""


def _check(target: Any, device: str) -> None:
    """Check what can be checked without ranks: the signature. Correctness tests check the rest."""
    expected = "(params, optimizer_cls, *, process_group=None, **defaults)"
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; a sharded optimizer is ShardedOptimizer{expected}")
    check_signature(target, expected, [torch.ones(1)], torch.optim.SGD, process_group=None, lr=0.1)
    if isinstance(target, type) and not issubclass(target, torch.optim.Optimizer):
        raise RegistryError(f"{target!r} is not a class of torch.optim.Optimizer")


SEVERAL_DTYPES = "parameters of several dtypes"


def _several_dtypes(params: Any) -> str | None:
    return SEVERAL_DTYPES if "," in (dtypes_in(tensors_of(params)) or "") else None


FAMILY = add_family(
    Family(
        "sharded_optimizer",
        ShardedOptimizerContract,
        reference="unsharded",
        check=_check,
        may_refuse=(
            Refusable(
                "dtypes other than float32", lambda params, *_, **__: other_dtypes(tensors_of(params)), elsewhere=True
            ),
            Refusable(SEVERAL_DTYPES, lambda params, *_, **__: _several_dtypes(params)),
        ),
        memory=balanced_peak,  # a user's own optimizer: shards of equal size
        time=Race("zero_redundancy", budget=2.0),
        facts=Facts(),
    )
)

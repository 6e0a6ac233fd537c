"""The contract of data-parallel wrappers, the check that a target meets it, and the family."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from impl.data_parallel.accounting import copying_peak
from shardmark.api import Family, Race, Refusable, RegistryError, add_family, check_signature, other_dtypes


class DataParallelWrapper(Protocol):
    """`Wrapper(module, *, process_group=None, **options)`, a class or a function, called as the module is: it hands its
    arguments on to the module's own call, hooks and all.

    Wrapping gives every rank of the process group the parameters and buffers of the group's first rank, bit for bit
    (also -0.0 and the bits of NaNs). Ranks outside of the group take no part, and other wrappers do not change,
    then or later. Wrapping raises ValueError for a module with no trainable parameter, and, on every rank, if the
    ranks' modules differ in a parameter's name, shape, dtype or `requires_grad`; that error names the first
    parameter that differs. Strides may differ: a parameter may be transposed on one rank and contiguous on another.

    After `finish_gradient_synchronization`, which is called between backward and `optimizer.step()`, each trainable
    parameter's `.grad` is the average over the group's ranks of what backward passes added to it, with the
    parameter's shape and dtype. It is as exact as that dtype allows and bitwise equal on every rank, for any order
    in which gradients arrive and however late a rank is. A gradient missing on a rank counts as zero; if no rank
    has one, `.grad` is None or zeros. In each step a rank may have gradients of other parameters; if the ranks'
    differ, nothing else may communicate on the process group between backward and
    `finish_gradient_synchronization`.

    Parameters frozen before wrapping have no gradient and are not communicated. A parameter frozen later is treated
    as one without a gradient on any rank, until it is trainable again. Tied parameters are communicated once.
    Buffers that forward changes are never synchronized, not even by `train()` or `eval()`. Wrapping a part of the
    module again, in another process group, does not change this wrapper's averages, even between backward and
    `finish_gradient_synchronization`. `state_dict` has the module's own names. If a wrapper is an `nn.Module`, its
    `parameters()` are the module's, and its `train()` and `eval()` reach the module.

    Options of some implementations. `bucket_mb` is the size, in MB of 2^20 bytes and counted in the gradients'
    dtype, of what is communicated at once: all collectives on gradients but the last of each dtype have that size,
    give or take one parameter, even if dtypes alternate; if it is above 1 MB, some may have as little as 1 MB, to
    start or end early. `reduce_dtype` is the dtype of communication, wider or narrower than the gradients' own,
    which is the default. Without `find_unused_parameters` every backward pass must reach every parameter.

    The suite's own wrappers raise RuntimeError at an `optimizer.step()` on gradients that were not averaged since
    backward produced them, inside or outside of `no_sync`; gradients that `zero_grad()` freed do not count. If
    `finish_gradient_synchronization` takes an `optimizer`, it also steps it, and raises RuntimeError inside
    `no_sync`.
    """

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes in this context, of forward passes in it, stay local and accumulate, until a
        backward pass outside of it and `finish_gradient_synchronization`, which does nothing inside. It begins when it
        is entered, not when it is made. An error ends it as well. One inside another ends nothing but itself."""
        ...


def _check(target: Any, device: str) -> None:
    """Check what can be checked without ranks: the signature and the methods. Correctness tests check the rest."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; a wrapper is Wrapper(module, *, process_group=None)")
    check_signature(target, "(module, *, process_group=None)", nn.Linear(1, 1), process_group=None)
    made = target.func if isinstance(target, functools.partial) else target
    for method in ("finish_gradient_synchronization", "no_sync"):
        if inspect.isclass(made) and not callable(getattr(made, method, None)):
            raise RegistryError(f"it has no method {method}()")


FAMILY = add_family(
    Family(
        "data_parallel",
        DataParallelWrapper,
        reference="naive",
        check=_check,
        may_refuse=(
            Refusable(
                "dtypes other than float32", lambda module, **_: other_dtypes(module.parameters()), elsewhere=True
            ),
        ),
        memory=copying_peak,
        time=Race("naive", budget=2.0, goal=1.0),  # wide: on one rank naive communicates nothing
    )
)

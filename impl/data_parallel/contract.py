"""The contract of data-parallel wrappers, the check that a target meets it, and the family."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from impl.data_parallel.accounting import copying_peak
from shardmark.api import Family, Race, RegistryError, add_family


class DataParallelWrapper(Protocol):
    """`Wrapper(module, *, process_group=None, **options)`, a class or a function, called as the module is: it hands its
    arguments on to the module's own call, hooks and all.

    Wrapping gives every rank of the process group its first rank's parameters and buffers, to the bit (a -0.0 and each
    NaN's bits, too); ranks outside of the group take no part, and nothing changes in other wrappers, then or later. It
    raises ValueError for a module with no trainable parameter, and, on every rank, when the ranks' modules differ in a
    parameter's name, shape, dtype or `requires_grad`; that error names the first parameter that does. Strides may
    differ: on one rank a parameter may be transposed, on another contiguous.

    After `finish_gradient_synchronization`, between backward and `optimizer.step()`, each trainable parameter's `.grad`
    is the average over the group's ranks of what backward passes added to it there, with that parameter's shape and
    dtype. It is as exact as that dtype allows and the same on every rank to the bit, whatever order gradients arrive in
    and however late a rank is. A gradient that a rank does not have counts as zero; where no rank has one, `.grad` is
    None or zeros. Each rank may have others in each step; where they differ, nothing else communicates on the process
    group between backward and `finish_gradient_synchronization`.

    Parameters frozen before wrapping have no gradient and are not communicated. One frozen later counts as one that no
    rank has a gradient of, until it is trainable again. Tied ones are communicated once. Buffers that forward changes
    are never synchronized, nor at `train()` or `eval()`. Wrapping a part of the module once more, in another process
    group, does not change this wrapper's averages, even between backward and `finish_gradient_synchronization`.
    `state_dict` has the module's own names. Of a wrapper that is an `nn.Module`, `parameters()` are the module's, and
    `train()` and `eval()` reach it.

    Options that some take: `bucket_mb`, the size in MB of 2^20 bytes of what is communicated at once, counted in the
    gradients' dtype: all collectives on gradients but the last of each dtype have that size, give or take one
    parameter, also where dtypes alternate; of more than 1 MB, some may have down to 1 MB, to start or end early.
    `reduce_dtype`, the dtype of communication, by default the gradients' own, and wider or narrower than that.
    `find_unused_parameters`, without which every backward pass must reach every parameter.

    The suite's own wrappers raise RuntimeError at an `optimizer.step()` on gradients that were not averaged since
    backward produced them, in `no_sync` or outside of it; gradients that `zero_grad()` freed do not count. A
    `finish_gradient_synchronization` that takes an `optimizer` steps it, too, and raises RuntimeError inside `no_sync`.
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
    try:
        inspect.signature(target).bind(nn.Linear(1, 1), process_group=None)
    except TypeError as error:
        raise RegistryError(f"it is called as Wrapper(module, *, process_group=None, **options): {error}") from None
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
        memory=copying_peak,
        time=Race("naive", budget=2.0, goal=1.0),  # wide: on one rank naive communicates nothing
    )
)

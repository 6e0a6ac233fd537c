"""The contract of data-parallel wrappers: what a user calls, the check of a target, and the family."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from impl.data_parallel.accounting import ddp_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class DataParallelWrapper(Protocol):
    """`Wrapper(module, *, process_group=None, **options)`, called as the module is.

    Wrapping gives every rank rank 0's parameters and buffers; it raises ValueError for a module with no trainable
    parameter, and on every rank when the ranks' modules differ, naming the first parameter that does. After
    `finish_gradient_synchronization`, between backward and `optimizer.step()`, each trainable parameter's `.grad` is
    the average over the ranks, and a gradient that this rank does not have counts as zero. Frozen parameters keep no
    gradient; tied ones are communicated once. Buffers that forward changes are each rank's own. `state_dict` has the
    module's own names.

    Ours raise RuntimeError at an `optimizer.step()` on gradients that backward has produced since, inside `no_sync` or
    out of it; those that `zero_grad()` let go of do not count. Where the method takes an `optimizer`, it steps it too,
    and inside `no_sync` raises RuntimeError.
    """

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        ...

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes in this context stay local and accumulate."""
        ...


def _check(target: Any, device: str) -> None:
    """What can be told without ranks: the signature and the methods. The rest is the correctness tests' to find."""
    try:
        inspect.signature(target).bind(nn.Linear(1, 1), process_group=None)
    except TypeError as error:
        raise RegistryError(f"it is called as Wrapper(module, *, process_group=None, **options): {error}") from None
    for method in ("finish_gradient_synchronization", "no_sync"):
        if not callable(getattr(target, method, None)):
            raise RegistryError(f"it has no method {method}()")


FAMILY = add_family(
    Family(
        "data_parallel",
        DataParallelWrapper,
        reference="naive",
        check=_check,
        memory=ddp_peak,
        time=Race("naive", budget=2.0, goal=1.0),  # on one rank naive has nothing to do
    )
)

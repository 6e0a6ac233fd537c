"""The contract of data-parallel wrappers, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from impl.data_parallel.accounting import ddp_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class DataParallelWrapper(Protocol):
    """`Wrapper(module, *, process_group=None, **options)`, called as the module is.

    Wrapping gives every rank rank 0's parameters and buffers. It raises ValueError for a module with no trainable
    parameter, and, on every rank, when the ranks' modules differ; that error names the first parameter that does. After
    `finish_gradient_synchronization`, between backward and `optimizer.step()`, each trainable parameter's `.grad` is
    the average over the ranks; a gradient that a rank does not have counts as zero. Frozen parameters have no gradient,
    and tied ones are communicated once. Buffers that forward changes are not synchronized. `state_dict` has the
    module's own names.

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
        """Gradients of backward passes in this context stay local and accumulate."""
        ...


def _check(target: Any, device: str) -> None:
    """Check what can be checked without ranks: the signature and the methods. Correctness tests check the rest."""
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
        time=Race("naive", budget=2.0, goal=1.0),  # wide: on one rank naive communicates nothing
    )
)

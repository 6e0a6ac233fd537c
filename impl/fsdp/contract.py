"""The contract of fully sharded data parallelism: what a user calls, the check of a target, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn

from impl.fsdp.accounting import sharded_peak
from shardmark.registry import Family, Race, RegistryError, add_family


class FullySharded(Protocol):
    """`FullyShardedDataParallel(module, *, process_group=None, compute_dtype=None, reduce_dtype=None, ...)`.

    Wrapping gives every rank rank 0's parameters and buffers; it raises ValueError for a module with no trainable
    parameter, for one that is spread over ranks already, and on every rank when the ranks' modules differ, naming the
    first parameter that does. From then on `parameters()` are this rank's shards, in the parameters' own dtype, some
    perhaps without elements, and any optimizer takes them. After `finish_gradient_synchronization`, between backward
    and `optimizer.step()`, each trainable one's `.grad` has its shape and dtype and is this rank's part of the average
    over the ranks; a gradient that a rank does not have counts as zero, and gradients of several backward passes add
    up. Frozen parameters keep no gradient. Modules stay what `isinstance` says.

    Every rank must run the same units in the same order, in forward and in backward; a parameter may be read only while
    the forward of its own unit, or of one around it, runs.
    """

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        ...

    def finish_gradient_synchronization(self) -> None:
        """Return when every shard has its part of the averaged gradient."""
        ...

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole and in its own dtype, by the name it has in the module. All ranks call."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients to a norm, over all ranks, of at most `max_norm`; the norm that they had. All ranks call."""
        ...


def _check(target: Any, device: str) -> None:
    """What can be told without ranks: the signature and the methods. The rest is the correctness tests' to find."""
    try:
        inspect.signature(target).bind(nn.Linear(1, 1), process_group=None, compute_dtype=None, reduce_dtype=None)
    except TypeError as error:
        raise RegistryError(
            f"it is called as Wrapper(module, *, process_group=None, compute_dtype=None, reduce_dtype=None): {error}"
        ) from None
    for method in ("finish_gradient_synchronization", "gather_full_parameters"):
        if not callable(getattr(target, method, None)):
            raise RegistryError(f"it has no method {method}()")


FAMILY = add_family(
    Family(
        "fsdp",
        FullySharded,
        reference="sharded_plain",
        check=_check,
        memory=sharded_peak,
        time=Race("fsdp2", budget=2.0),
    )
)

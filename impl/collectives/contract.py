"""The contract of collectives, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from impl.collectives.accounting import buffered_peak
from shardmark.api import Family, Refusable, RegistryError, add_family, made_once


class Handle(Protocol):
    """Handle of an asynchronous collective. Until `wait` returns, do not touch the tensors that it reads and writes.

    A rank's `wait` needs the other ranks to have started the collective, but not to wait for it. Local work, such
    as adding what other ranks sent, may be done in `wait`. Each rank may wait for handles in its own order, and drop
    one that it need not wait for: the others have their results. A second `wait` does nothing, except that it may
    write the same result again, as Gloo's reduce-scatter does.
    """

    def wait(self) -> Any:
        """Return when the result is written (on CUDA: what the current stream does next comes after that)."""
        ...


class Collectives(Protocol):
    """An object with three methods, or a class of which one is made without arguments. The first two reduce by summing.

    Each method returns when its result is written; with `async_op` it returns a `Handle`, at once if possible. Every
    rank of the group starts the same collectives in the same order. "Rank i" is the i-th of the group. Tensors are of
    integers, real or complex numbers (these, or an error), contiguous, of any shape and size, and may be views of
    larger ones, disjoint views of one tensor, or empty. `output` and `input` have the same dtype, and with n ranks the
    first dimension of one is n times as large as that of the other.

    Must:

    - Sums of integers are exact. The error of floating-point sums is at most that of n - 1 additions in the tensors'
      own dtype, in any order; an all-reduce gives bitwise equal sums on every rank.
    - Nothing is written but the result. A call in inference mode changes nothing for later ones. Memory that stays does
      not grow with the number of calls, nor with how many different sizes they have.
    - Any number may be under way, in several groups too; asynchronous ones on CPU in two groups may be started in
      different orders on ranks that do not wait in between. The caller's own messages do not mix with them.
    - Ranks outside of a group take no part. Groups may come and go.

    Should: results of tensors that require a gradient require none.
    """

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Replace `tensor` by its sum over the ranks."""
        ...

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Put into rank i's `output` the sum over the ranks of the i-th of n equal parts of `input`.

        `output` may be that part of `input`; the rest of `input` may be overwritten then.
        """
        ...

    def all_gather(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Put every rank's `input`, in rank order, into `output` on every rank; `input` may be its part of `output`."""
        ...


def _adapted(target: Any) -> Any:
    """The one object of a class whose methods need one: its state may be a thread, on which everything runs in
    order."""
    if not inspect.isclass(target):
        return target
    needs_one = any(inspect.isfunction(inspect.getattr_static(target, name, None)) for name in METHODS)
    return made_once(target) if needs_one else target


def _check(target: Any, device: str) -> None:
    target = _adapted(target)
    for name, arguments in METHODS.items():
        method = getattr(target, name, None)
        if not callable(method):
            raise RegistryError(f"it has no {name}()")
        try:
            inspect.signature(method).bind(*[None] * arguments, async_op=True)
        except TypeError as error:
            raise RegistryError(f"{name}() does not take {arguments} arguments and async_op: {error}") from None


METHODS = {"all_reduce": 2, "reduce_scatter": 3, "all_gather": 3}
"""The contract's methods, and the number of positional arguments of each."""

FAMILY = add_family(
    Family(
        "collectives",
        Collectives,
        reference="backend",
        check=_check,
        memory=buffered_peak,
        adapt=_adapted,
        methods=tuple(METHODS),
        may_refuse=(
            Refusable(
                "devices other than cpu",
                lambda tensor, *_, **__: None if tensor.is_cpu else tensor.device.type,
                elsewhere=True,
            ),
        ),
    )
)

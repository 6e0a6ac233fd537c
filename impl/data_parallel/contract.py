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
    arguments on to the module's own call, hooks and all, and returns its outputs, in containers of their own classes.

    Must:

    - Wrapping gives every rank of the process group the parameters and buffers of the group's first rank, bit for bit,
      and draws no random numbers.
    - After `finish_gradient_synchronization`, which is called between backward and `optimizer.step()`, each trainable
      parameter's `.grad` is the average over the group's ranks of what backward passes through the wrapper's outputs
      added to it since it was cleared, in its shape and dtype (complex ones too), as exact as that dtype allows, and
      bitwise equal on every rank: in whatever order gradients arrive, however late a rank is, whatever accumulated
      before, also in a tensor that the user has put there. A second backward outside of `no_sync` before it counts
      too, or is a RuntimeError; also where gradients are cleared between the two backward passes, and where both
      forward passes precede them. To call it again changes nothing.
    - A call runs under the caller's autocast, which rounds no gradient when it is averaged.
    - An output requires a gradient where the module's own does. Later calls leave what a call has returned as it is.
    - The loss may do with outputs and parameters what it may without the wrapper: change outputs in place, leave some
      out, use parameters itself, take gradients by `torch.autograd.grad` before backward. Parts of the module may be
      recomputed in backward. Sparse gradients, those with a graph (`backward(create_graph=True)`, as in torch's DDP),
      and parts that are recomputed in passes of their own (`use_reentrant`), may be an error. An error in a forward
      pass leaves nothing behind. A module that was cast to another dtype and back averages as before, or the next pass
      is an error.
    - A gradient that a rank lacks, while it has others, counts as zero; if no rank has one, `.grad` is None or zeros.
      Frozen parameters have none and may be of integers; tied ones have one.
    - Inside `no_sync()` gradients stay local, are not communicated, and count in the next average. An error ends it as
      the end of its block does.
    - Ranks outside of the process group take no part; several wrappers do not disturb one another.
    - A deleted wrapper frees its parameters. An `nn.Module`'s `parameters()`, `train()` and `eval()` reach the module.

    Should: ValueError, on every rank, for a module without trainable parameters and where the ranks' modules differ in
    a parameter's name, shape, dtype or `requires_grad`, naming the first; names in `state_dict` are the module's own;
    buffers that forward changes stay each rank's own; `no_sync()` inside another ends nothing but itself, begins when
    it is entered, and communicates no buffers either; a rank without a backward pass, or whose pass reaches no
    parameter, counts as zero; a backward pass without a forward pass of the wrapper, as of a loss of parameters alone,
    counts too or is an error; parameters may be frozen and thawed after wrapping; strides may have gaps and differ
    between ranks, and several parameters may be views of one memory; a part may be wrapped
    again in another group; frozen parameters are not communicated and tied ones once; buffers may be of every dtype,
    and expanded; `bucket_mb`, in MB of 2^20 bytes of the gradients' dtype, is the size of what is communicated at once.

    Options of some: `reduce_dtype` is the dtype in which real gradients are communicated, by default their own. Without
    `find_unused_parameters` every backward pass must reach every parameter. The suite's own wrappers raise RuntimeError
    at an `optimizer.step()` on gradients that were not averaged (`impl.data_parallel.base`).

    Not asked: other communication on the process group between backward and `finish_gradient_synchronization` where
    ranks have gradients of different parameters.
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

"""The contract of fully sharded data parallelism, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from impl.fsdp.accounting import sharded_peak
from impl.fsdp.nine_linears_accounting import Formulas
from shardmark.api import Family, Race, Refusable, RegistryError, add_family, check_signature, other_dtypes


class FullySharded(Protocol):
    """`FullyShardedDataParallel(module, *, process_group=None, compute_dtype=None, reduce_dtype=None, ...)`.

    Every rank of the group runs the same units in the same order, in forward and in backward, and reads a parameter
    only while the forward of its own unit, or of one around it, runs. n is the group's size.

    Must:

    - Wrapping gives every rank the parameters and buffers of the group's first rank. `parameters()` are then, and after
      an evaluation, this rank's shards, in the parameters' own dtype, for any optimizer, which may write their `.data`;
      some may be empty. Several dtypes in one unit may be an error. Modules keep their classes. Wrapping draws no
      random numbers, and a step draws its module's and no others.
    - A call is the module's own: arguments, hooks, outputs (in tuples, lists and dicts too, of which a loss may use
      any, and in subclasses of these and dataclasses, which keep their classes), gradients of inputs. Where a
      unit's inputs or outputs are changed in place it is right, or an error; its forward may run again in backward.
      Later calls leave what a call has returned as it is.
    - After `finish_gradient_synchronization`, which is called between backward and `optimizer.step()`, each trainable
      shard's `.grad`, of its shape and dtype, is this rank's part of the average over the ranks. A gradient missing on
      a rank counts as zero, unless parameters are DTensors, which are reduced one by one; one missing on all is zero or
      None; one that is not finite on a rank is so on all. Gradients add up until they are set to None, each to what the
      user left of it. Parameters that were frozen when wrapped have none, and may be of integers that the backend
      sends; tied ones stay one. Parameters may have been views of one memory.
    - A forward may call a unit several times. Several forwards may precede their backwards, a forward may have no
      backward or two of them (or the second is an error), and evaluation may come at any time, first and in
      inference mode too. The module runs under the caller's autocast; gathering and reducing do not.
    - A rank stores about 1/n of the model; once a step is synchronized, nothing but shards of parameters and gradients
      is left, and after an evaluation little more. Ranks outside of the group take no part; several models do not
      disturb one another.
    - With `compute_dtype`, floating-point parameters and the module's inputs are cast to it, and matrices are
      multiplied in it, in evaluation too; each wrapper has its own. With `reduce_dtype` gradients are communicated in
      it; the default is the compute dtype or the gradients' own.
    - If there is a `state_dict`, `load_state_dict` takes its result on the same ranks, in a wrapper made anew too.

    Should: full gradients are freed as backward goes; ValueError for a module without trainable parameters, for a
    wrapper, and on every rank where the ranks' modules differ in names or shapes; `gather_full_parameters` returns
    copies.

    Options of some: `wrap`, a function from a module to its submodules that become units; `reshard_after_forward`,
    whether full parameters are freed between forward and backward; `ignored_params`, a function from a module to
    those of its parameters that every rank keeps in full, with the full averaged gradient.

    Not asked: complex parameters with a `compute_dtype` or a `reduce_dtype`; casting the inputs of
    inner units, which FSDP1 does not do.
    """

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def finish_gradient_synchronization(self) -> None:
        """Return when every shard has its part of the averaged gradient."""
        ...

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Copies of all full parameters as the shards are now, in their own dtype, by their names in the module before
        it was wrapped; a tied one by each name. All ranks call.
        """
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients as `torch.nn.utils.clip_grad_norm_` does, by their norm over all ranks, so that it is at
        most `max_norm`; return the norm before that, which may be in float32. All ranks call. This method may be left
        out.
        """
        ...


@dataclass(frozen=True)
class Facts:
    """Facts about a way to shard that questions need, stated where it is registered; a user's own gets the defaults."""

    reshard_after_forward: bool = True
    norms_replicated: bool = False
    gathers_first_again: bool = True
    """True if backward all-gathers the first of the nine linears again. It need not: nothing asks for the gradient
    of the input, so nothing reads the weight."""
    nine_linears: Formulas | None = None
    """Closed forms of the step of nine linears, where they are known."""


def _check(target: Any, device: str) -> None:
    """Check what can be checked without ranks: the signature and the methods. Correctness tests check the rest."""
    expected = "(module, *, process_group=None, compute_dtype=None, reduce_dtype=None)"
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; a wrapper is Wrapper{expected}")
    options = {"process_group": None, "compute_dtype": None, "reduce_dtype": None}
    check_signature(target, expected, nn.Linear(1, 1), **options)
    while isinstance(target, partial):
        target = target.func
    if not inspect.isclass(target):
        return  # a function that makes the wrapper: what it returns is seen on ranks
    for method in ("finish_gradient_synchronization", "gather_full_parameters"):
        if not callable(getattr(target, method, None)):
            raise RegistryError(f"it has no method {method}()")


TIED = "tied parameters"
ODD_PARAMETERS: dict[str, Callable[[Tensor], bool]] = {
    "parameters without elements": lambda p: p.numel() == 0,
    "parameters without dimensions": lambda p: p.ndim == 0,
    "parameters that are not contiguous": lambda p: not p.is_contiguous(),
}


INTEGERS = "parameters of integers"


def has_integers(module: nn.Module) -> bool:
    """Whether any parameter is of integers, which PyTorch's FSDP2 takes from torch 2.13 on."""
    return not all(p.is_floating_point() or p.is_complex() for p in module.parameters())


def _has(kind: str, module: nn.Module, **_: Any) -> str | None:
    return kind if any(map(ODD_PARAMETERS[kind], module.parameters())) else None


def _has_tied_parameters(module: nn.Module) -> bool:
    return len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))


FAMILY = add_family(
    Family(
        "fsdp",
        FullySharded,
        reference="sharded_plain",
        check=_check,
        may_refuse=(
            Refusable(
                "dtypes other than float32", lambda module, **_: other_dtypes(module.parameters()), elsewhere=True
            ),
            Refusable(TIED, lambda module, **_: TIED if _has_tied_parameters(module) else None),
            *(Refusable(kind, partial(_has, kind)) for kind in ODD_PARAMETERS),
            Refusable(INTEGERS, lambda module, **_: INTEGERS if has_integers(module) else None),
            Refusable("cpu_offload", lambda *_, cpu_offload=False, **__: "cpu_offload" if cpu_offload else None),
        ),
        memory=sharded_peak,
        time=Race("fsdp2", budget=2.0),
        facts=Facts(),
    )
)

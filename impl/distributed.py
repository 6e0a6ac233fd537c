"""Shared by wrappers and sharded optimizers: modules that agree on every rank, gradient hooks, checks before steps,
and plain state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

T = TypeVar("T")
W = TypeVar("W", bound=nn.Module)


def backward_twice(before: str = "finish_gradient_synchronization()") -> RuntimeError:
    """The error for a second gradient of a parameter whose first may be being communicated."""
    return RuntimeError(f"backward ran twice before {before}; run all but the last in no_sync()")


class PlainStateDict(nn.Module):
    """A wrapper whose state is its module's, under the module's own names."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, gathered from its ranks, which all call; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_same_module(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, the same on every rank, where nothing is trainable or the ranks' modules differ.

    Names, shapes, dtypes and `requires_grad` must be the same: a collective between ranks that disagree on them would
    hang or mix up parameters.
    """
    own = [(name, described(tensor)) for name, tensor in chain(module.named_parameters(), module.named_buffers())]
    every_rank = of_every_rank(own, process_group)
    differences = [
        (*_first_difference(every_rank[0], other), rank)
        for rank, other in enumerate(every_rank)
        if other != every_rank[0]
    ]
    if differences:  # the first rank's difference, in the module's order
        _, name, here, there, rank = min(differences, key=lambda difference: difference[0])
        raise ValueError(f"the ranks' modules differ at {name!r}: {here} on rank 0, {there} on rank {rank}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no trainable parameters, so there is no gradient to average")


def described(tensor: Tensor) -> str:
    """The properties that all ranks must agree on: shape, dtype and `requires_grad`."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}, {'trainable' if tensor.requires_grad else 'frozen'}"


def of_every_rank(own: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """All-gather a picklable object: return every rank's `own`, in rank order."""
    every_rank: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(every_rank, own, group=process_group)
    return every_rank


def has_own_memory(gradient: Tensor) -> bool:
    """True if `gradient` may be overwritten: autograd may give several nodes views of one tensor."""
    itself_and_the_python_object = 2
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) == itself_and_the_python_object


def broadcast_state(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for tensor in chain(module.parameters(), module.buffers()):
        broadcast_in_place(tensor, process_group)


@torch.no_grad()
def broadcast_in_place(tensor: Tensor, process_group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Give every rank the values that rank `source` of the group has in a tensor of any dtype and strides, which may be
    expanded and differ by rank.

    A collective sends memory as it lies, and Gloo has none for some dtypes: so bytes are sent, in the elements' order.
    """
    sent = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dist.broadcast(sent.as_strided((sent.numel(),), (1,)).view(torch.uint8), group=process_group, group_src=source)
    if sent.data_ptr() == tensor.data_ptr() or not tensor.numel():
        return
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0:  # expanded: its elements along `dim` are one
            tensor, sent = tensor.select(dim, 0), sent.select(dim, 0)
    tensor.copy_(sent)


def _first_difference(own: list[tuple[str, str]], other: list[tuple[str, str]]) -> tuple[int, str, str, str]:
    """Return the first difference between two descriptions: position, name, and the entry in each."""
    here, there = dict(own), dict(other)
    for place, name in enumerate(here | there):
        if here.get(name) != there.get(name):
            return place, name, here.get(name, "missing"), there.get(name, "missing")
    return 0, own[0][0], "in another order", "in another order"  # the same entries in both


def check_dense(parameter: nn.Parameter) -> None:
    """Raise ValueError for a sparse gradient."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise ValueError(
            f"gradients must be dense, and that of a parameter of shape {tuple(parameter.shape)} is "
            f"{parameter.grad.layout}: make its embedding without sparse=True"
        )


def call_on_gradient(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
    """Call a wrapper's method each time backward has produced the parameter's gradient.

    The hook holds the wrapper weakly. A strong reference would be a cycle (parameter, hook, wrapper, parameter) that
    leads through C++, where the garbage collector cannot find it.
    """
    weak = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := weak()) is not None:
            alive(parameter)

    parameter.register_post_accumulate_grad_hook(hook)


_checks: weakref.WeakKeyDictionary[nn.Module, Callable[[Any, Optimizer], None]] = weakref.WeakKeyDictionary()


def check_before_steps(wrapper: W, check: Callable[[W, Optimizer], None]) -> None:
    """Call `check(wrapper, optimizer)` before each step of any optimizer, for as long as the wrapper lives.

    One hook serves every wrapper and stays. A hook of each wrapper's own would have to be removed when the wrapper is
    freed, and where the garbage collector frees it during a step, torch is iterating over the hooks.
    """
    _checks[wrapper] = check
    _watch_steps()


@cache
def _watch_steps() -> None:
    """Register the hook; the first wrapper does."""

    def run_checks(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for wrapper, check in _checks.items():
            check(wrapper, optimizer)

    register_optimizer_step_pre_hook(run_checks)

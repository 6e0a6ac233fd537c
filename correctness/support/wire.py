"""What a rank communicates, and delays that make a race fail every time. For functions that run on ranks.

    with recorded() as sent:                       # every collective and message of this process, of any thread
        model.finish_gradient_synchronization()
    assert sum(each.nbytes for each in sent) == 4 * parameters

    with delayed(before=0.05, on=0):               # rank 0 starts each collective late, so the others' end late
        handle = collectives.all_reduce(tensor, async_op=True)
        handle.wait()

They stand between torch's dispatcher and the process group, so they see what is called from Python, from C++ (DDP's
reducer) and from compiled code, by whatever name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "barrier": "barrier",
}
"""What the process group's operators are called here."""


@dataclass(frozen=True)
class Communication:
    """One collective or message. `nbytes` is the larger of what goes in and what comes out, so it is the whole tensor
    of an all-gather and of a reduce-scatter. `ranks` is the size of its process group.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.name} of {self.nbytes} bytes of {str(self.dtype).removeprefix('torch.')} on {self.ranks} ranks"


Listener = Callable[[Communication, bool], None]
"""Called with each communication and whether it is about to start; and again once it has been started."""


@contextmanager
def recorded() -> Iterator[list[Communication]]:
    """The collectives and messages that this process starts, in order; barriers, which carry nothing, are left out."""
    found: list[Communication] = []

    def note(each: Communication, starting: bool) -> None:
        if starting and each.name != "barrier":
            found.append(each)

    with _listening(note):
        yield found


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Raise RuntimeError where `what` starts to communicate, which would hang where one rank alone does it."""

    def refuse(each: Communication, starting: bool) -> None:
        raise RuntimeError(f"{what} communicates, in {each}")

    with _listening(refuse):
        yield


@contextmanager
def delayed(*, before: float = 0.0, after: float = 0.0, on: int | None = None) -> Iterator[None]:
    """Sleep so many seconds before and after the start of each collective, on one rank of the world, or on all."""

    def sleep(each: Communication, starting: bool) -> None:
        time.sleep(before if starting else after)

    if on is not None and on != dist.get_rank():
        yield
        return
    with _listening(sleep):
        yield


@contextmanager
def slow_gradients(module: nn.Module, seconds: Callable[[int], float]) -> Iterator[None]:
    """Have backward sleep `seconds(i)` before it stores the gradient of the i-th trainable parameter."""
    trainable = [p for p in module.parameters() if p.requires_grad]

    def sleep(i: int) -> Callable[[Tensor], None]:
        return lambda _: time.sleep(seconds(i))

    hooks = [parameter.register_hook(sleep(i)) for i, parameter in enumerate(trainable)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_listeners: list[Listener] = []
_library: torch.library.Library | None = None
_OURS = torch._C.DispatchKey.ADInplaceOrView
"""A key of every tensor that c10d has no kernel for; functional collectives reach it too, where autograd is done."""


@contextmanager
def _listening(listener: Listener) -> Iterator[None]:
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for operator in NAMES:
            _library.impl(operator, _kernel(operator), "ADInplaceOrView")
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _library._destroy()
            _library = None


def _kernel(operator: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator).default
    arguments = [argument.name for argument in overload._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        each = _described(operator, dict(zip(arguments, args, strict=False)) | kwargs)
        for listener in list(_listeners):
            listener(each, True)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_OURS)):
            result = overload(*args, **kwargs)
        for listener in list(_listeners):
            listener(each, False)
        return result

    return kernel


def _described(operator: str, arguments: dict[str, Any]) -> Communication:
    tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in arguments.values()]
    nbytes = max((sum(tensor.nbytes for tensor in each) for each in tensors), default=0)
    dtype = next((each[0].dtype for each in tensors if each), torch.uint8)
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    return Communication(NAMES[operator], dtype, 0 if operator == "barrier" else nbytes, group.size())

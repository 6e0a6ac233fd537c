"""Record what a rank communicates, and delay it so that a race fails every time; called on ranks.

with recorded() as sent:                       # every collective and message of this process, of any thread
    model.finish_gradient_synchronization()
assert sum(each.nbytes for each in sent) == 4 * parameters

with delayed(before=0.05, on=0):               # rank 0 starts each collective late, so the others' end late
    handle = collectives.all_reduce(tensor, async_op=True)
    handle.wait()
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from shardmark.meter.communication import Communication, listening


@contextmanager
def recorded() -> Iterator[list[Communication]]:
    """Record the collectives and messages that this process starts, in order; without barriers, which carry no data."""
    found: list[Communication] = []

    def note(each: Communication, starting: bool) -> None:
        if starting and each.name != "barrier":
            found.append(each)

    with listening(note):
        yield found


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Raise RuntimeError if `what` communicates: if one rank alone does, it would hang."""

    def refuse(each: Communication, starting: bool) -> None:
        raise RuntimeError(f"{what} communicates, in {each}")

    with listening(refuse):
        yield


@contextmanager
def delayed(*, before: float = 0.0, after: float = 0.0, on: int | None = None) -> Iterator[None]:
    """Sleep so many seconds before and after the start of each collective, on one rank of the world or on all."""

    def sleep(each: Communication, starting: bool) -> None:
        time.sleep(before if starting else after)

    if on is not None and on != dist.get_rank():
        yield
        return
    with listening(sleep):
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

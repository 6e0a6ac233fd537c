"""What the four wrappers share: the same start on every rank, and the module's own face to the outside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

T = TypeVar("T")


def backward_twice(before: str = "finish_gradient_synchronization()") -> RuntimeError:
    """A gradient came again, though the first may be on its way already."""
    return RuntimeError(f"backward ran twice before {before}; run all but the last in no_sync()")


class PlainStateDict(nn.Module):
    """A wrapper whose state is its module's, under the module's own names."""

    module: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own `state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)


class DataParallel(PlainStateDict):
    """Wrap `module`: check that the ranks agree on it, and give every rank rank 0's parameters and buffers.

    Subclasses communicate gradients, in `_average`. Contract and errors: `impl.data_parallel.DataParallelWrapper`.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(self.process_group)
        self.synchronizing = True  # False inside no_sync
        self.trainable = [p for p in module.parameters() if p.requires_grad]  # a tied parameter comes once
        check_same_module(module, self.process_group)
        broadcast_state(module, self.process_group)
        self._own: dict[nn.Parameter, None] = {}  # whose gradient is this rank's alone, in the order they came
        for parameter in self.trainable:
            call_on_gradient(parameter, self._on_gradient)
        _wrappers.add(self)
        _watch_optimizers()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the average over the ranks; inside `no_sync`, do nothing."""
        if self.synchronizing:
            self._own.clear()
            self._average()

    def _average(self) -> None:
        """Make every gradient the average over the ranks."""
        raise NotImplementedError

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Backward has produced the parameter's gradient."""
        self._own[parameter] = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in this context stay local and accumulate."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before


def check_same_module(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, the same on every rank, for nothing to train or for modules that differ between ranks.

    Names, shapes, dtypes and `requires_grad` must be the same everywhere: a collective between ranks that do not
    agree on them would hang or mix up parameters.
    """
    mine = [(name, described(tensor)) for name, tensor in chain(module.named_parameters(), module.named_buffers())]
    everyone = of_every_rank(mine, process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            name, here, there = _first_difference(everyone[0], theirs)
            raise ValueError(f"the ranks' modules differ at {name!r}: {here} on rank 0, {there} on rank {rank}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no trainable parameters, so there is no gradient to average")


def described(tensor: Tensor) -> str:
    """What ranks must agree on of a tensor."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}, {'trainable' if tensor.requires_grad else 'frozen'}"


def of_every_rank(mine: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's `mine`, which goes by pickle, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, group=process_group)
    return everyone


@torch.no_grad()
def broadcast_state(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for tensor in chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor, group=process_group, group_src=0)


def _first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> tuple[str, str, str]:
    """The first name at which two descriptions part, and what each has there."""
    here, there = dict(mine), dict(theirs)
    for name in here | there:
        if here.get(name) != there.get(name):
            return name, here.get(name, "missing"), there.get(name, "missing")
    return mine[0][0], "in another order", "in another order"  # all of them are there, with other neighbours


def gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient; zeros, put in its place, where this rank's loss did not reach it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def check_dense(parameter: nn.Parameter) -> None:
    """ValueError for a sparse gradient."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise ValueError(
            f"gradients must be dense, and that of a parameter of shape {tuple(parameter.shape)} is "
            f"{parameter.grad.layout}: make its embedding without sparse=True"
        )


def call_on_gradient(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> None:
    """Call a wrapper's method each time backward has produced the parameter's gradient.

    The parameter must not keep the wrapper alive: the way from its hooks to the wrapper and back runs through C++,
    where no garbage collector follows it.
    """
    weak = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := weak()) is not None:
            alive(parameter)

    parameter.register_post_accumulate_grad_hook(hook)


_wrappers: weakref.WeakSet[DataParallel] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """From the first wrapper on, look before every optimizer's step."""
    register_optimizer_step_pre_hook(_refuse_own_gradients)


def _refuse_own_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for a gradient that backward produced and nobody has averaged: the ranks would part.

    A gradient that was let go of in between, as `zero_grad()` does, is forgotten.
    """
    for wrapper in _wrappers:
        if not wrapper._own:
            continue
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter in wrapper._own and parameter.grad is not None:
                name = next(name for name, p in wrapper.module.named_parameters() if p is parameter)
                raise RuntimeError(
                    f"the gradient of {name!r} is this rank's alone: call finish_gradient_synchronization(), outside "
                    "no_sync(), between backward and optimizer.step()"
                )

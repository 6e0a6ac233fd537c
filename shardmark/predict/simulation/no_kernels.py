"""Run a program without its kernels: each operator allocates what it would, and computes nothing.

    with no_kernels():
        loss = model(tokens).sum()  # a loss of the right shape, and of no value
        loss.backward()

Tensors are PyTorch's own, on the CPU: autograd, hooks, wrappers and the allocator do what they always do, and so the
memory meter sees every allocation of the real run, at the same moment. As nothing is written, the kernel gives them no
pages: they may be far larger than the machine's memory.

Small tensors that are made from the program's own numbers (indices, sizes, loss scales) are computed. Other results
have no values, as their kernels were left out, and a program that reads one is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.library import _scoped_library
from torch.utils._pytree import tree_map_only

from shardmark.api.registry import Unsupported
from shardmark.meter.allocations import user_line
from shardmark.predict.simulation.compiled import compiling_graphs, untraced
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.grouped import GROUPED, grouped_layout
from shardmark.predict.simulation.host_memory import HostMemory
from shardmark.predict.simulation.kinds import (
    LEFT_AMONG_ELEMENTS,
    Kind,
    is_called_by_autograd,
    kind_of,
    made_of_others,
    of_finite_numbers,
    tensors_in,
    written_by,
)
from shardmark.predict.simulation.routing import Routing
from shardmark.predict.simulation.schedule import Schedule

SMALL = 2**14
"""Most elements of a tensor whose values are computed, where these follow from the program's own numbers."""
INDICES = 2**20
"""Most elements of such a tensor of integers: a device mesh has one for each rank."""

_KEY = torch._C._dispatch_key_parse("FPGA")
"""The dispatch key by which operators come here. It lies above the CPU's kernels and below all that decides what is
called: autograd, autocast, DTensor, a user's modes. PyTorch itself registers no kernel under this key.
"""
_KEYS = torch._C.DispatchKeySet(_KEY)

aten = torch.ops.aten

_FINITE = aten._amp_foreach_non_finite_check_and_unscale_.default
"""Looks for infinite gradients and writes whether it found any: none, in a simulation."""

_PASSED_BY = (aten.as_strided.default, aten.view.default, aten.empty.memory_format, aten.empty_strided.default)
"""Operators that compute nothing and skip the key, to save time: FSDP cuts a tensor into one view for each rank."""

Take = Callable[[OpOverload, tuple[Any, ...]], None]
"""Takes an operator's workspace and gives it back."""

Collective = Callable[[OpOverload, tuple[Any, ...]], Any]
"""Allocates what a backend would for a collective of c10d with those arguments; returns its results."""


class _Kernels:
    """Runs operators without kernels, for one simulation."""

    def __init__(
        self,
        collective: Collective,
        take: Take | None,
        schedule: Schedule,
        routing: Routing | None,
        host: HostMemory | None,
    ) -> None:
        self._collective = collective
        self._take = take
        self._schedule = schedule
        self._routing = routing
        self._host = host
        self._fake = FakeTensorMode()
        self._layouts: dict[Any, Any] = {}
        self._one_at_a_time = threading.Lock()  # fake tensors are for one thread
        self._alone: tuple[int, ...] | None = None
        """Use counts, in `__call__`, of a gradient that autograd alone holds otherwise. Autograd would add in place to
        this gradient; as Python holds it too, `__call__` adds in place instead."""

    def learn(self) -> None:
        """Learn `_alone` from the sum of two gradients that only autograd holds."""
        with torch.enable_grad():
            x = torch.ones((), requires_grad=True) * 1
            _forget_value(x)  # Python then holds the storage, too, as it does of other gradients without a value
            (x.sin() + x.cos()).backward()

    def __call__(self, keys: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if self._schedule.running:
            self._schedule.arrived(operator, args)
        if operator is aten.add.Tensor and _are_gradients(*args[:2]):
            references = _references(args[0])
            self._alone = self._alone or references
            if references == self._alone:
                return args[0].add_(args[1])
        if self._host is not None and self._host.used and self._host.concerns(operator, args, kwargs):
            return self._host.run(operator, args, kwargs, partial(self._results, keys, operator, *args, **kwargs))
        results = self._results(keys, operator, *args, **kwargs)
        if self._take is not None:
            self._take(operator, args)  # a kernel begins once its results are allocated
        if self._schedule.running and not keys.has(DispatchKey.Meta):
            self._schedule.operator(operator, args, kwargs, results)
        return results

    def fused(self, cost: Cost) -> None:
        """Compiled code launches a kernel, whose results are allocated."""
        if self._schedule.running:
            self._schedule.fused(cost)

    def _results(self, keys: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(operator, on_a_gpu=self._host is not None)
        if kind is Kind.SEND:
            return self._send(keys, operator, args)
        if kind is Kind.RUN:
            return operator.redispatch(keys.remove(_KEY), *args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if keys.has(DispatchKey.Meta) or (kind is not Kind.ALLOCATE and all(map(has_value, tensors))):
            with _off(operator):
                return operator(*args, **kwargs)
        if kind is Kind.READ:
            raise _depends_on_values(operator.name())
        if kind is Kind.WRITE:
            return self._write(operator, args, kwargs)
        results = _allocated(self._layout(operator, args, kwargs))
        if self._routing is not None:
            with _off(operator):
                chosen = self._routing.choose(operator, args, results)
            if chosen is not None and _is_small(chosen):
                delattr(chosen.untyped_storage(), "no_value")
        finite = of_finite_numbers(operator, args)
        if finite is not None and _is_small(results):
            del results.untyped_storage().no_value
            results.fill_(finite)
        return results

    def _send(self, keys: Any, operator: OpOverload, args: tuple[Any, ...]) -> Any:
        if all(map(has_value, tensors_in(args))):
            with past_kernels():
                operator.redispatch(keys.remove(_KEY), *args)  # copies the tensors for each rank
        else:
            for tensor in tensors_in(args[:1]):  # a collective writes its first argument
                _forget_value(tensor)
        return self._collective(operator, args)

    def _write(self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Write nothing into the operator's arguments, but resize an `out` that has another shape."""
        given = written_by(operator, args, kwargs)
        if any(argument.is_out for argument, _ in given):
            results = self._layout(operator, args, kwargs)
            layouts = results if isinstance(results, tuple) else (results,)
            for (_, out), layout in zip(given, layouts, strict=False):
                if isinstance(layout, _Layout) and out.shape != layout.shape:
                    out.resize_(layout.shape)
        written = [tensor for _, tensor in given]
        if operator is not _FINITE:
            for tensor in tensors_in(written):
                _forget_value(tensor)
        returns = operator._schema.returns
        if any(each.alias_info is None for each in returns):  # as batch norm, which writes its running statistics
            return _allocated(self._layout(operator, args, kwargs))
        return None if not returns else written[0] if len(returns) == 1 else tuple(written[: len(returns)])

    def _layout(self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator's results, with a `_Layout` for each tensor; remembered, as steps repeat themselves."""
        counts = tuple(_counted(operator, args))
        key = operator, _described(args), tuple((name, _described(value)) for name, value in kwargs.items()), counts
        if key not in self._layouts:
            try:
                with self._one_at_a_time, _off(operator), self._fake:
                    fake_args, fake_kwargs = tree_map_only(Tensor, _empty_like, (tuple(args), kwargs))
                    if counts:
                        fake_args = fake_args[0], _as_indices(fake_args[1], list(counts))
                    of = grouped_layout if operator is GROUPED else operator
                    results = of(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise _depends_on_values(operator.name()) from None
            room = max(map(Tensor.numel, tensors_in(args))) if operator in LEFT_AMONG_ELEMENTS else 0
            self._layouts[key] = tree_map_only(Tensor, partial(_Layout, room=room), results)
        return self._layouts[key]


def _counted(operator: OpOverload, args: Sequence[Any]) -> Iterator[int]:
    """The numbers of True in the masks of `x[mask]`; none where a mask has no value, or for another operator."""
    if operator is aten.index.Tensor:
        masks = [each for each in tensors_in(args[1:2]) if each.dtype == torch.bool]
        if all(map(has_value, masks)):
            with _off(operator):
                yield from [int(mask.sum()) for mask in masks]


def _as_indices(indices: Sequence[Tensor | None], counts: list[int]) -> list[Tensor | None]:
    """Empty indices, as PyTorch makes them of each mask: one for each of its dimensions."""
    found: list[Tensor | None] = []
    for each in indices:
        masks = each is not None and each.dtype == torch.bool
        count = counts.pop(0) if masks else 0
        of = (
            [torch.empty(count, dtype=torch.int64) for _ in range(each.dim())] if masks and each is not None else [each]
        )
        found += of
    return found


@contextmanager
def _off(operator: OpOverload) -> Iterator[None]:
    """Run the operator as usual in the block, in a range by which the meter sees its workspace."""
    with past_kernels(), record_function(operator._schema.name):
        yield


class _Layout:
    """Shape, strides and dtype of a result."""

    def __init__(self, tensor: Tensor, room: int = 0) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.room = room
        """Elements of its storage, where these are more than its own."""

    def allocate(self) -> Tensor:
        if self.room > self.shape.numel():
            tensor = torch.empty(self.room, dtype=self.dtype, device="cpu").as_strided(self.shape, self.stride)
        else:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        _forget_value(tensor)
        return tensor


def _allocated(layouts: Any) -> Any:
    """Results of those layouts."""
    if isinstance(layouts, _Layout):
        return layouts.allocate()
    if isinstance(layouts, tuple | list):
        return type(layouts)(map(_allocated, layouts))
    return layouts


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _laid_out(values: Any) -> Any:
    """Results like these."""
    return _allocated(tree_map_only(Tensor, _Layout, values))


def _described(value: Any) -> Any:
    """Hashable key of all that a result's layout depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (SMALL if tensor.is_floating_point() else INDICES)


def past_kernels() -> Any:
    """Run operators with their kernels within the block."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def has_value(tensor: Tensor) -> bool:
    """True where a simulation computes its numbers: it is small, and every number it was made from is known."""
    return _is_small(tensor) and not hasattr(tensor.untyped_storage(), "no_value")


def _forget_value(tensor: Tensor) -> None:
    if _is_small(tensor):
        setattr(tensor.untyped_storage(), "no_value", True)  # noqa: B010  (PyTorch's type has no such attribute)


def _are_gradients(old: Tensor, new: Any) -> bool:
    """True where autograd itself, and no line of the program, sums two gradients of one tensor."""
    return isinstance(new, Tensor) and old.shape == new.shape and is_called_by_autograd()


def _references(tensor: Tensor) -> tuple[int, ...]:
    """References to the tensor, to its storage, and to its Python object."""
    of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), of_storage, sys.getrefcount(tensor)  # type: ignore[attr-defined]


def _depends_on_values(called: str) -> Unsupported:
    where = user_line(sys._getframe(1)) or "PyTorch"
    return Unsupported(f"{called} in {where} depends on values, and a simulation has none")


def _read(method: Callable[..., Any]) -> Callable[..., Any]:
    """A Tensor method that reads values past the dispatcher, made to refuse values that are not computed."""

    def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta and not has_value(tensor):
            raise _depends_on_values(f"Tensor.{method.__name__}")
        return method(tensor, *args, **kwargs)

    return reading


def _drawn_twice(truncated_normal: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch draws again until all numbers lie within the bounds, for which it reads them. Without values: one more
    draw, if some are expected outside."""

    @torch.no_grad()
    def drawing(x: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        try:
            return truncated_normal(x, mean, std, a, b, generator)
        except Unsupported:
            normal = NormalDist(mean, std)
            if x.numel() * (normal.cdf(a) + 1 - normal.cdf(b)) >= 1:
                mask = torch.empty_like(x, dtype=torch.bool)
                x.copy_(torch.where(mask, torch.empty_like(x).normal_(mean, std), x))
            return x

    return drawing


def _in_threads(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Threads that start in the block run no kernels either."""

    def running(thread: threading.Thread) -> None:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            run(thread)

    return running


def _fake_alone(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Leave fake tensors, by which DTensor asks for shapes, to PyTorch."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with past_kernels():
            return dispatch(*args, **kwargs)

    return alone


@contextmanager
def no_kernels(
    collective: Collective,
    take: Take | None = None,
    schedule: Schedule | None = None,
    routing: Routing | None = None,
    host: HostMemory | None = None,
) -> Iterator[None]:
    """Leave out kernels on the CPU in the block, in this thread and in those that it starts. `collective` replaces each
    collective, `take` takes an operator's workspace, and `schedule` notes operators and collectives. `routing` says
    which experts routers choose. `host` is the memory to which a GPU's program may offload.
    """
    kernels = _Kernels(collective, take, schedule or Schedule(), routing, host)
    with ExitStack() as stack:
        everything, named = (stack.enter_context(_scoped_library(of, "IMPL")) for of in ("_", "aten"))
        everything.fallback(untraced(kernels), "FPGA", with_keyset=True)
        for operator in made_of_others():
            named.impl(operator, _named(kernels, operator), "FPGA", with_keyset=True)
        for operator in _PASSED_BY:
            named.impl(operator, torch.library.fallthrough_kernel, "FPGA")
        for owner, name, around in (
            (Tensor, "tolist", _read),
            (Tensor, "numpy", _read),
            (threading.Thread, "run", _in_threads),
            (FakeTensorMode, "__torch_dispatch__", _fake_alone),
            (torch.nn.init, "_no_grad_trunc_normal_", _drawn_twice),
        ):
            stack.enter_context(patch.object(owner, name, around(getattr(owner, name))))
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(_KEY))
        kernels.learn()
        stack.enter_context(compiling_graphs(past_kernels, _laid_out, kernels.fused))
        yield


def _named(kernels: _Kernels, operator: OpOverload) -> Callable[..., Any]:
    return untraced(lambda keys, *args, **kwargs: kernels(keys, operator, *args, **kwargs))

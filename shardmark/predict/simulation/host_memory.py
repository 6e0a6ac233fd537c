"""Host memory in a simulation of a GPU: which tensors a program has put there, and copies between it and the device.

All tensors of a simulation are on the CPU and count as the GPU's, but for those that a program offloads: by
`Tensor.cpu` (but single values, which are read), by pinned memory (`Tensor.pin_memory`, `torch.empty(...,
pin_memory=True)`), by `save_on_cpu`, and where PyTorch's FSDP2 and `to_host` offload gradients. The host computes with
them, and the results are in its memory, too. `Tensor.to` a device takes them back. An optimizer's step counts are the
GPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.jit import _builtins
from torch.optim import optimizer as optimizers
from torch.utils._device import _device_constructors

from shardmark.meter.allocations import PLACE, Allocated, Event, Marked, Released
from shardmark.meter.memory import RESET
from shardmark.meter.recording import mark
from shardmark.predict.simulation.costs import Cost, cost_of, touched
from shardmark.predict.simulation.kinds import Kind, kind_of, tensors_in
from shardmark.predict.simulation.schedule import Schedule

DEVICE, PINNED, PAGEABLE = "", "pinned", "pageable"

_OF_SHAPES = ("empty_strided", "zeros", "ones", "full")
_LIKE_OTHERS = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_OF_TENSORS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
"""Functions that make a tensor, and take its device and whether it is pinned."""

COPY, _COPY_ALL = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default
_INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)
_OFFLOADING = ("torch.distributed.fsdp._fully_shard", "shardmark.api.host")
"""Modules whose `Tensor.to` the CPU means the host's memory; a program's own may mean the device, which is one here."""


class HostMemory:
    """The host's memory of one simulation."""

    def __init__(self, schedule: Schedule) -> None:
        self.used = False
        """Whether the program has put a tensor there."""
        self._schedule = schedule
        self._patches = ExitStack()
        self._copies_to: tuple[str, bool | None] | None = None
        """Place to which the next operator copies, and whether the host waits for it; None: the host copies itself."""
        self._place = DEVICE

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let programs put tensors there in the block. Until one does, few of PyTorch's functions are replaced."""
        _device_constructors()  # remembered from the first call on, by which `with torch.device(...)` knows them
        self._patch(Tensor, "cpu", self._cpu)
        self._patch(Tensor, "pin_memory", lambda own: lambda tensor, device=None: self._pin(tensor))
        self._patch(Tensor, "is_pinned", lambda own: lambda tensor, device=None: place_of(tensor) == PINNED)
        self._patch(save_on_cpu, "__init__", lambda own: self._saves_on_cpu)
        self._patch(torch, "empty", self._made)
        with self._patches:
            yield

    def _use(self) -> None:
        """The program puts a first tensor there."""
        if self.used:
            return
        self.used = True
        self._patch(Tensor, "to", self._to)
        for owner, names in ((torch, (*_OF_SHAPES, *_LIKE_OTHERS)), (Tensor, _OF_TENSORS)):
            for name in names:
                self._patch(owner, name, self._made)
        own = optimizers._default_to_fused_or_foreach
        for name, module in list(sys.modules.items()):  # those of optimizers are no attributes of torch.optim
            if name.startswith("torch.optim") and getattr(module, own.__name__, None) is own:
                self._patch(module, own.__name__, self._one_by_one)

    def _patch(self, owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function until the simulation ends; TorchScript goes on to know it."""
        own = getattr(owner, name)
        new = around(own)
        self._patches.enter_context(patch.object(owner, name, new))
        scripted = _builtins._get_builtin_table()
        if id(own) in scripted:
            self._patches.enter_context(patch.dict(scripted, {id(new): scripted[id(own)]}))

    def copy(self, tensor: Tensor, place: str, waits: bool | None) -> Tensor:
        """A copy in that place; the host waits for it, or not, or makes it. Its gradient is copied back."""
        if tensor.requires_grad and torch.is_grad_enabled():
            copied: Tensor = _Copied.apply(tensor, self, place, waits)
            return copied
        self._use()
        self._copies_to = place, waits
        try:
            return tensor.clone()
        finally:
            self._copies_to = None

    def concerns(self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the operator copies to or from the host's memory, or computes there."""
        if self._copies_to is not None:
            return True
        if kind_of(operator) is Kind.SEND:
            return False
        given = args[:1] if operator in _INDEXED else args  # the host's indices may index a device's tensor
        return any(place_of(each) for each in tensors_in(given) if each.dim() or operator is COPY)

    def run(
        self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results_of: Callable[[], Any]
    ) -> Any:
        """Run such an operator: allocate its results in their place, and schedule it."""
        copies, self._copies_to = self._copies_to, None
        place, waits = copies or (PAGEABLE, True)
        with self._allocating_in(place):
            results = results_of()
        given = list(tensors_in(args))
        for each in tensors_in([results]):
            if place and not any(each is one for one in given):
                _put(each, place)
        if not self._schedule.running:
            return results
        if operator in (COPY, _COPY_ALL):
            to, of = (args[0], args[1]) if operator is _COPY_ALL else ([given[0]], [given[-1]])
            for one, other in zip(to, of, strict=True):
                self._write(one, other, asynchronous=bool(args[2:] and args[2]))
        elif copies is not None and waits is not None and (place == DEVICE) != (place_of(given[0]) == DEVICE):
            self._copied(given[0], waits or PAGEABLE in (place, place_of(given[0])))
        elif (cost := cost_of(operator, args, kwargs, results, on_a_gpu=True)) is not None:
            self._schedule.of_host(operator._schema.name.partition("::")[2], cost)
        return results

    def _write(self, to: Tensor, of: Tensor, asynchronous: bool) -> None:
        """Schedule a copy into a tensor: over the link, or within one memory."""
        places = place_of(to), place_of(of)
        over_link, casts = (places[0] == DEVICE) != (places[1] == DEVICE), to.dtype != of.dtype
        if not over_link or casts:  # the host casts, into memory that is not pinned
            self._schedule.of_host("copy_", Cost(of.dtype, 0.0, touched(to) + touched(of)))
        if over_link:
            self._copied(of if places[0] else to, casts or not asynchronous or PAGEABLE in places)

    def _copied(self, tensor: Tensor, waits: bool) -> None:
        """Between pageable memory and a device the host waits, whatever the program asks for (CUDA's documentation,
        "API synchronization behavior")."""
        self._schedule.copied(touched(tensor), waits)

    def _cpu(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(own)
        def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not _is_plain(tensor) or place_of(tensor) or tensor.numel() <= 1:
                return own(tensor, *args, **kwargs)
            return self.copy(tensor, PAGEABLE, waits=True)

        return cpu

    def _pin(self, tensor: Tensor) -> Tensor:
        """`Tensor.pin_memory`: the host copies, as PyTorch pins only what is in its memory."""
        return tensor if place_of(tensor) == PINNED else self.copy(tensor, PINNED, waits=None)

    def _to(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(own)
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.get("device", args[0] if args else None)
            if not self.used or not isinstance(device, torch.device | str) or not _is_plain(tensor):
                return own(tensor, *args, **kwargs)
            waits = not kwargs.get("non_blocking", any(each is True for each in args[1:]))
            if place_of(tensor):
                tensor = self.copy(tensor, DEVICE, waits)
            elif sys._getframe(1).f_globals["__name__"].startswith(_OFFLOADING) and device == torch.device("cpu"):
                # Copies for which nobody waits go to memory that PyTorch pins.
                tensor = self.copy(tensor, PAGEABLE if waits else PINNED, waits)
            return own(tensor, *args, **kwargs)

        return to

    def _made(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that makes a tensor: in pinned memory, on a device that the program names, or where the tensor is
        that it is made like."""

        @wraps(own)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            like = args[0] if args and isinstance(args[0], Tensor) and kwargs.get("device") is None else None
            place = PINNED if pin_memory else PAGEABLE if self.used and like is not None and place_of(like) else DEVICE
            if not place:
                return own(*args, **kwargs)
            self._use()
            with self._allocating_in(place):
                tensor = own(*args, **kwargs)
            _put(tensor, place)
            return tensor

        return made

    @contextmanager
    def _allocating_in(self, place: str) -> Iterator[None]:
        """Allocate in that place in the block."""
        before, self._place = self._place, place
        mark(PLACE + place)
        try:
            yield
        finally:
            self._place = before
            mark(PLACE + before)

    @property
    def _saves_on_cpu(self) -> Callable[..., None]:
        """`save_on_cpu`, which else asks for a GPU before it pins."""

        def init(hooks: save_on_cpu, pin_memory: bool = False, device_type: str = "cuda") -> None:
            place = PINNED if pin_memory else PAGEABLE
            saved_tensors_hooks.__init__(
                hooks,
                lambda tensor: self.copy(tensor.detach(), place, waits=not pin_memory),
                lambda tensor: self.copy(tensor, DEVICE, waits=not pin_memory),
            )

        return init

    def _one_by_one(self, own: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
        """Optimizers update the host's parameters one by one, where the caller does not say."""

        @wraps(own)
        def choose(params: list[Tensor], *args: Any, **kwargs: Any) -> tuple[bool, bool]:
            return (False, False) if any(map(place_of, params)) else own(params, *args, **kwargs)

        return choose


class _Copied(torch.autograd.Function):
    """A copy in another place, whose gradient goes back to where the tensor is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, host: HostMemory, place: str, waits: bool | None) -> Tensor:
        ctx.host, ctx.place = host, place_of(tensor)
        return host.copy(tensor, place, waits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        there = place_of(grad) == ctx.place
        return grad if there else ctx.host.copy(grad, ctx.place, waits=True), None, None, None


def place_of(tensor: Tensor) -> str:
    """PINNED or PAGEABLE for a tensor in the host's memory; else DEVICE."""
    return getattr(_local(tensor).untyped_storage(), "place", DEVICE)


def _put(tensor: Tensor, place: str) -> None:
    setattr(_local(tensor).untyped_storage(), "place", place)  # noqa: B010  (PyTorch's type has no such attribute)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_sparse


def _local(tensor: Any) -> Tensor:
    """A DTensor's own part."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def peaks(events: Iterable[Event]) -> tuple[int, int]:
    """Peaks since the last reset in the host's memory: bytes of tensors, and of pinned blocks, each rounded up to a
    power of two (PyTorch's CachingHostAllocator; `pinned_max_round_threshold_mb` limits that)."""
    live = {PINNED: 0, PAGEABLE: 0}
    rounded = most = most_pinned = 0
    for event in events:
        if isinstance(event, Allocated | Released):
            sign, block = 1 if isinstance(event, Allocated) else -1, event.block
            if block.place in live:
                live[block.place] += sign * block.nbytes
                rounded += sign * _power_of_two(block.nbytes) * (block.place == PINNED)
        elif isinstance(event, Marked) and event.name == RESET:
            most, most_pinned = sum(live.values()), rounded
        most, most_pinned = max(most, sum(live.values())), max(most_pinned, rounded)
    return most, most_pinned


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0

"""CUDA's rules for tensors on the CPU: where PyTorch takes other memory on CUDA than on the CPU.

- autocast has other lists (`shardmark.predict.simulation.autocast`);
- `scaled_dot_product_attention` has other kernels, which save and need other things, and RMSNorm one of its own;
- optimizers update all parameters at once (`foreach`), where the caller does not say;
- kernels and libraries take memory for themselves (`shardmark.predict.simulation.workspaces`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.backends import cuda
from torch.cuda.amp import common
from torch.distributed import Logger
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.library import _scoped_library
from torch.optim import optimizer as optimizers

from shardmark.api.host import counts_as_device_memory
from shardmark.api.registry import Unsupported
from shardmark.meter import memory
from shardmark.meter import recording as blocks
from shardmark.meter.allocations import EMPTY_CACHE, STREAM, Event
from shardmark.meter.hardware import CONTEXT, Hardware
from shardmark.meter.measure_case import MEDIAN
from shardmark.meter.recording import mark
from shardmark.predict.simulation.autocast import autocast_of_cuda
from shardmark.predict.simulation.caching_allocator import held_at_marks
from shardmark.predict.simulation.host_memory import HostMemory, peaks
from shardmark.predict.simulation.schedule import Schedule
from shardmark.predict.simulation.streams import ALL_AWAITED, AWAITED, FIRST, FOLLOWED, RECORDED, USED
from shardmark.predict.simulation.workspaces import Workspaces

aten = torch.ops.aten

_FLASH_WIDTH = 256
"""Largest head dimension that FlashAttention takes."""
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def rules_of_cuda(hardware: Hardware, schedule: Schedule, host: HostMemory) -> Iterator[Workspaces]:
    """Follow CUDA's rules, for that hardware and its `host`, in whatever the block runs on the CPU without kernels."""
    workspaces = Workspaces(hardware)
    supported = optimizers._get_foreach_kernels_supported_devices()
    with ExitStack() as stack:
        operators = stack.enter_context(_scoped_library("aten", "IMPL"))
        # With a kernel on the CPU, RMSNorm is one operator to autograd, and so is its backward.
        operators.impl("_fused_rms_norm", _never, "CPU")
        for key in ("AutogradCPU", "FPGA"):
            operators.impl("scaled_dot_product_attention", partial(_attention, hardware), key)
        stack.enter_context(autocast_of_cuda())
        stack.enter_context(counts_as_device_memory("cpu"))
        stack.enter_context(host.running())
        for owner, name, new in (
            (optimizers, "_get_foreach_kernels_supported_devices", lambda: [*supported, "cpu"]),
            (blocks, "have_libraries_give_back", workspaces.give_back),
            *_Streams(schedule).patches(),
            (common, "amp_definitely_not_available", lambda: False),  # or GradScaler("cuda") disables itself
            (torch.cuda, "empty_cache", partial(mark, EMPTY_CACHE)),
        ):
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(patch.dict(memory.METERS, cpu=partial(_Meter, hardware.memory_bytes - CONTEXT)))
        yield workspaces


class _Streams:
    """Replaces the streams and events of PyTorch's FSDP and DDP, which do nothing on the CPU. Their uses are noted in
    the recording, for `shardmark.predict.simulation.streams`, and in the schedule, which waits."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._streams: list[object] = [torch.cpu.current_stream()]
        self._entered = self._streams[:]
        self._events = 0

    def patches(self) -> list[tuple[object, str, Callable[..., Any]]]:
        """Replacements of PyTorch's own functions, by owner and name."""
        return [
            (torch.cpu, "stream", self.enter),
            (torch.cpu, "current_stream", lambda device=None: self._entered[-1]),
            (torch.accelerator, "current_stream", lambda device=None: self.recorded(self._entered[-1], None)),
            (torch.cpu, "synchronize", lambda device=None: self.synchronize()),
            (torch.cpu, "Event", partial(_Event, self)),
            # These become methods.
            (torch.cpu.Stream, "wait_stream", lambda stream, other: self.wait(stream, other)),
            (torch.cpu.Stream, "record_event", lambda stream, event=None: self.recorded(stream, event)),
            (torch.cpu.Stream, "wait_event", lambda stream, event: event.wait(stream)),
            (Tensor, "record_stream", lambda tensor, stream: self.use(tensor, stream)),
            (Logger, "set_runtime_stats_and_log", self.log(Logger.set_runtime_stats_and_log)),
            # PyTorch's own function does nothing on a device without streams.
            *((each, "_no_dispatch_record_stream", self.use) for each in (_flat_param, _runtime_utils)),
        ]

    @contextmanager
    def enter(self, stream: object) -> Iterator[None]:
        """Allocate and run on that stream in the block; with None on the current one."""
        self._entered.append(self._entered[-1] if stream is None else stream)
        mark(STREAM + self.name())
        try:
            with self.schedule.on_stream(self.name()):
                yield
        finally:
            self._entered.pop()
            mark(STREAM + self.name())

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.schedule.synchronize()
        mark(ALL_AWAITED)

    def use(self, tensor: Tensor, stream: object) -> None:
        """The stream uses the tensor's block: `Tensor.record_stream`."""
        if tensor.untyped_storage().nbytes():
            mark(f"{USED}{tensor.untyped_storage().data_ptr()} {self.name(stream)}")

    def wait(self, stream: object, other: object) -> None:
        """The stream waits for all work enqueued on the other one."""
        self.schedule.wait(self.schedule.free(self.name(other)), self.name(stream))
        mark(f"{FOLLOWED}{self.name(stream)}/{self.name(other)}")

    def recorded(self, stream: object, event: _Event | None) -> _Event:
        """The event, or a new one, recorded on the stream."""
        event = _Event(self) if event is None else event
        event.record(stream)
        return event

    def record(self, stream: object) -> int:
        """The number of a new event, recorded on that stream, or on the current one."""
        self._events += 1
        mark(f"{RECORDED}{self._events} {self.name(stream)}")
        return self._events

    def log(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        """DDP's statistics, which wait for the last step's events in the first ten steps (its reducer_cuda.cpp)."""
        steps: Counter[int] = Counter()

        def logging(logger: Any) -> None:
            if 0 < steps[id(logger)] <= 10:
                mark(ALL_AWAITED)
            steps[id(logger)] += 1
            own(logger)

        return logging

    def name(self, stream: object = None) -> str:
        """The stream's number, or the current one's; empty for the first stream."""
        stream = self._entered[-1] if stream is None else stream
        number = next((i for i, known in enumerate(self._streams) if known is stream), len(self._streams))
        if number == len(self._streams):
            self._streams.append(stream)
        return str(number or FIRST)


class _Event:
    """Replaces `torch.cpu.Event`."""

    def __init__(self, streams: _Streams, **kwargs: Any) -> None:
        self._streams = streams
        self._number: int | None = None
        self._over = 0.0

    def record(self, stream: object = None) -> None:
        self._number = self._streams.record(stream)
        self._over = self._streams.schedule.free(self._streams.name(stream))

    def synchronize(self) -> None:
        """The host waits for it."""
        self._streams.schedule.host_waits(self._over)
        if self._number is not None:
            mark(f"{AWAITED}{self._number}")

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None:
        """The stream waits for it, which makes no difference to blocks: `wait_stream` alone does."""
        self._streams.schedule.wait(self._over, self._streams.name(stream))


class _Meter(memory.Meter):
    """A meter that also follows the caching allocator of a device of that size."""

    def __init__(self, limit: int, device: str) -> None:
        super().__init__(device)
        self._limit = limit

    def read(self) -> None:
        events = self._recorded.replay_all()
        self.follow(blocks.of_device(events))
        self.host, self.pinned = peaks(events)

    def follow(self, events: list[Event]) -> None:
        super().follow(events)
        held, slowest = (
            held_at_marks(events, resets=(memory.RESET,), limit=self._limit, slowest=slowest)
            for slowest in (False, True)
        )
        if at_peak := held.get(memory.PEAK + MEDIAN):
            self.allocated, self.reserved = at_peak.peak_allocated, at_peak.peak_reserved
            self.reserved_at_most = max(self.reserved, slowest[memory.PEAK + MEDIAN].peak_reserved)
        for name, stage in self.stages.items():
            self.stages[name] = replace(stage, reserved=held[memory.STAGE + name].reserved)


def _never(*args: Any) -> None:
    """Registered because autograd takes whatever has a kernel for one operator; never run."""
    raise AssertionError("a simulation runs no kernel")


def _attention(
    hardware: Hardware,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with the first backend that is enabled and takes these arguments.

    cuDNN's backend, which recent PyTorch prefers on Hopper, saves what FlashAttention saves, and counts as
    FlashAttention.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"query, key and value have one dtype, not {query.dtype}, {key.dtype} and {value.dtype}")
    flash, efficient = _backends(hardware, query, key, value, attn_mask, enable_gqa, is_causal)
    if flash:
        width = query.size(-1)
        q, k, v = (_padded(each, 8) for each in (query, key, value))
        scale = width**-0.5 if scale is None else scale
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0][..., :width]
    if efficient:
        saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        mask = None if attn_mask is None else _as_bias(attn_mask, query)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, saves, dropout_p, is_causal, scale=scale
        )[0]
    if not cuda.math_sdp_enabled():
        raise Unsupported(f"no attention kernel that is allowed takes {query.dtype} of that shape on {hardware.name}")
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _backends(
    hardware: Hardware, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool, causal: bool
) -> tuple[bool, bool]:
    """Whether FlashAttention, and whether the memory-efficient kernel, takes these (PyTorch's sdp_utils.cpp)."""
    given = (query, key, value)
    heads = {each.size(1) for each in given if each.dim() == 4}
    if len({each.size(0) for each in given}) > 1 or (len(heads) > 1 and not grouped) or key.size(-2) != value.size(-2):
        return False, False  # which the parts take, or refuse
    if any(each.dim() != 4 or each.stride(-1) != 1 or 0 in each.shape for each in given):
        return False, False
    capability = hardware.capability or (9, 0)  # AMD's kernels take the same arguments
    half, width = query.dtype in _HALVES, query.size(-1)
    same = all(each.size(-1) == width for each in given) and width <= _FLASH_WIDTH
    allowed = cuda.flash_sdp_enabled() or (cuda.cudnn_sdp_enabled() and capability >= (9, 0))
    flash = allowed and half and capability >= (8, 0) and mask is None and same
    flash = flash and not (causal and query.size(-2) != key.size(-2))
    products_in_half = capability >= (8, 0) or half
    alignment = 16 // query.element_size() if products_in_half else 4 if capability >= (8, 0) else 1
    aligned = width % alignment == 0 and value.size(-1) % alignment == 0
    known = query.dtype == torch.float32 or query.dtype == torch.float16 or (half and capability >= (8, 0))
    efficient = cuda.mem_efficient_sdp_enabled() and known and aligned and not grouped
    return flash, efficient


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """The tensor with its last dimension padded with zeros to a multiple of `multiple`."""
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as a bias: numbers in the query's dtype to add to each score."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(*query.shape[:2], *mask.shape[-2:])

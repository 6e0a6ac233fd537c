"""Parameters that lie end to end in one flat tensor, all-gathered together and with gradients reduced together.

Each rank owns an equal part of the flat tensor, its shard. The full parameters are views of the flat tensor that the
all-gather writes. When backward has produced all gradients, they are copied into one such tensor for the
reduce-scatter; the full parameters have been freed by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Handle, collectives_for
from impl.distributed import call_on_gradient, has_own_memory
from shardmark.api import has_device_memory, to_host


@dataclass(frozen=True)
class Sharding:
    """The ranks that share the parameters, the dtypes of communication, and the devices."""

    process_group: dist.ProcessGroup
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    device: torch.device
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name, dtype in {"compute_dtype": self.compute_dtype, "reduce_dtype": self.reduce_dtype}.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} is a floating-point dtype or None, got {dtype!r}")

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def offloads(self) -> bool:
        """True if shards are in host memory while the model computes on another device."""
        return self.cpu_offload and has_device_memory(self.device)

    @property
    def shard_device(self) -> torch.device:
        """Device of shards, their gradients and the optimizer's state: `device`, or the CPU."""
        return torch.device("cpu") if self.offloads else self.device

    def wait_for_host_memory(self, *_: Any) -> None:  # a hook has arguments
        """Return when copies to host memory have arrived and copies from it are done, so that it may be overwritten."""
        if self.offloads:
            torch.accelerator.current_stream(self.device).synchronize()


class Flat:
    """Parameters of one dtype, all trainable or all frozen, end to end and padded to a multiple of the world size.

    Each parameter stays the same object, but its data becomes its part of this rank's shard: one-dimensional, perhaps
    empty. Forward and backward use `full` in its place: parameters in the original shapes, views of a flat tensor whose
    storage is allocated only while the unit is gathered.
    """

    def __init__(self, parameters: list[nn.Parameter], sharding: Sharding) -> None:
        first = parameters[0]
        floating = first.is_floating_point()
        self.sharding = sharding
        self._rank, self._ranks = self.part()
        self.parameters = parameters
        self.trainable = first.requires_grad
        self.shapes = [p.shape for p in parameters]
        self._offsets = [0, *accumulate(p.numel() for p in parameters)]
        self._shard_size = -(-self._offsets[-1] // self._ranks)
        chosen = sharding.reduce_dtype or sharding.compute_dtype
        self._reduce_dtype = chosen if chosen and floating else first.dtype  # complex gradients keep theirs
        self._gathering: Handle | None = None
        self._gradients: dict[int, Tensor] = {}  # full gradients by the parameter's index, as backward produces them
        self._gradient: Tensor | None = None  # all gradients end to end, while they are reduced
        self._reducing: Handle | None = None

        with torch.no_grad():
            shard = self._scatter().to(sharding.shard_device)
            self.shard = shard.pin_memory() if sharding.offloads else shard
            dtype = (sharding.compute_dtype if floating else None) or first.dtype
            self._flat = self._make_flat(dtype)
            # `data` has its own version counter, so autograd does not take an all-gather for a changed parameter.
            self.full = [nn.Parameter(x.data, requires_grad=self.trainable) for x in self._views(self._flat)]
            self._nbytes = self._flat.untyped_storage().nbytes()
            self._free()
            for parameter, view in zip(parameters, self.shard_views(self.shard), strict=True):
                parameter.grad = None
                parameter.data = view
        if self.trainable:
            for full in self.full:
                call_on_gradient(full, self._collect_gradient)

    def part(self) -> tuple[int, int]:
        """Index of this rank's shard, and the number of equal parts."""
        return self.sharding.rank, self.sharding.world_size

    @property
    def counted(self) -> bool:
        """True if a sum over all ranks counts this rank's elements."""
        return True

    def begin_gather(self) -> None:
        """Start to all-gather the shards, cast to the compute dtype, unless they are gathered or being gathered."""
        if self.gathered:
            return
        self._flat.untyped_storage().resize_(self._nbytes)
        with torch.no_grad():
            self._gathering = self._gather_into(self._flat)

    def finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Free the full parameters."""
        self.finish_gather()
        self._free()

    @property
    def gathered(self) -> bool:
        """True if the full parameters are gathered, or being gathered."""
        return self._flat.untyped_storage().nbytes() > 0 or self._nbytes == 0

    def _collect_gradient(self, full: nn.Parameter) -> None:
        gradient, full.grad = full.grad, None
        assert gradient is not None
        i = next(i for i, candidate in enumerate(self.full) if candidate is full)
        # Not added in place: the first gradient may be a view of a tensor that others use.
        self._gradients[i] = self._gradients[i] + gradient if i in self._gradients else gradient

    def begin_reduce(self) -> None:
        """Start to sum the gradients over the ranks; a gradient that this rank does not have counts as zero."""
        self._gradient = self._flatten_gradients()
        self._reducing = self._sum(self._gradient)

    def finish_reduce(self) -> None:
        """Wait for the sums, and add the averages to the `.grad` of this rank's shards."""
        if self._reducing is None or self._gradient is None:
            return
        self._reducing.wait()
        self._reducing = None  # before the next allocation: some backends' handles hold a copy of the gradient
        average = torch.empty_like(self.shard, device=self.sharding.device)
        average.copy_(self._shard_of(self._gradient)).div_(self.sharding.world_size)
        self._gradient = None
        # A non-blocking copy goes to pinned memory. One that is added to an older gradient must have arrived.
        accumulates = any(parameter.grad is not None for parameter in self.parameters)
        average = to_host(average, non_blocking=not accumulates) if self.sharding.offloads else average
        for parameter, view in zip(self.parameters, self.shard_views(average), strict=True):
            parameter.grad = view if parameter.grad is None else parameter.grad.add_(view)

    def _flatten_gradients(self) -> Tensor:
        """Copy all gradients into one flat tensor and free each; a single gradient without padding is used as it is."""
        only = self._gradients.get(0)
        alone = only is not None and only.numel() == self._flat.numel() and only.is_contiguous()
        if only is not None and alone and has_own_memory(only):
            return self._gradients.pop(0).to(self._reduce_dtype).resolve_conj().flatten()
        flat = torch.empty_like(self._flat, dtype=self._reduce_dtype)
        flat[self._offsets[-1] :] = 0  # padding
        for i, view in enumerate(self._views(flat)):
            if i in self._gradients:
                view.copy_(self._gradients.pop(i))
            else:
                view.zero_()
        return flat

    @property
    def has_gradient(self) -> bool:
        """True if backward has produced a gradient that is not yet being reduced."""
        return bool(self._gradients)

    @property
    def reducing(self) -> bool:
        return self._reducing is not None

    def discard_gradients(self) -> None:
        """Free the gradients of a backward. Other ranks take part in its reduce-scatter, so wait for that first."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        self._gradient = None
        self._gradients.clear()

    def gather_copies(self) -> list[Tensor]:
        """Copies of the full parameters in their own dtype."""
        flat = self.shard.new_empty(self._ranks * self._shard_size, device=self.sharding.device)
        if (gathering := self._gather_into(flat)) is not None:
            gathering.wait()
        return [view.clone() for view in self._views(flat)]

    def _scatter(self) -> Tensor:
        """Scatter rank 0's values; return this rank's shard."""
        flat = torch.zeros(self._ranks * self._shard_size, dtype=self.parameters[0].dtype, device=self.sharding.device)
        if self.sharding.rank == 0:
            for view, parameter in zip(self._views(flat), self.parameters, strict=True):
                view.copy_(parameter)
        dist.broadcast(flat, group=self.sharding.process_group, group_src=0)
        return self._shard_of(flat).clone()

    def _make_flat(self, dtype: torch.dtype) -> Tensor:
        """The flat buffer that the full parameters of `dtype` are views of."""
        return torch.empty(self._ranks * self._shard_size, dtype=dtype, device=self.sharding.device)

    def _free(self) -> None:
        """Free the memory of the full parameters."""
        self._flat.untyped_storage().resize_(0)

    def _gather_into(self, flat: Tensor) -> Handle | None:
        """Start to all-gather the shards, cast to the flat tensor's dtype."""
        shard, group = self.shard, self.sharding.process_group
        # The host would cast it otherwise, into memory that is not pinned.
        if self.sharding.offloads and shard.dtype != flat.dtype:
            shard = shard.to(self.sharding.device, non_blocking=True)
        own = self._shard_of(flat).copy_(shard, non_blocking=True)
        return collectives_for(group).all_gather(flat, own, group, async_op=True)

    def _sum(self, gradient: Tensor) -> Handle | None:
        """Start to sum this rank's part of a flat tensor over the ranks."""
        group = self.sharding.process_group
        return collectives_for(group).reduce_scatter(self._shard_of(gradient), gradient, group, async_op=True)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in the parameter's full shape."""
        bounds = pairwise(self._offsets)
        return [flat[begin:end].view(shape) for (begin, end), shape in zip(bounds, self.shapes, strict=True)]

    def _shard_of(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor."""
        return flat.narrow(0, self._rank * self._shard_size, self._shard_size)

    def shard_views(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of this rank's shard, one-dimensional."""
        start = self._rank * self._shard_size
        where = zip(self._offsets, self.intervals(), strict=False)
        return [shard[offset + begin - start :][: end - begin] for offset, (begin, end) in where]

    def intervals(self) -> list[tuple[int, int]]:
        """Interval (begin, end) of each flattened parameter that this rank's shard holds; the end is exclusive."""
        start = self._rank * self._shard_size
        return [
            (min(max(start - begin, 0), end - begin), min(max(start + self._shard_size - begin, 0), end - begin))
            for begin, end in pairwise(self._offsets)
        ]


class Replicated(Flat):
    """Parameters that every rank has in full and in their own shapes: the shard is the full flat tensor. Nothing is
    gathered, and gradients are all-reduced. If compute dtype and device are the stored ones, the full parameters
    share the shard's memory."""

    def part(self) -> tuple[int, int]:
        return 0, 1

    @property
    def counted(self) -> bool:
        return self.sharding.rank == 0

    def shard_views(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of the flat tensor, in its shape."""
        return self._views(shard)

    def _make_flat(self, dtype: torch.dtype) -> Tensor:
        shared = self.shard.dtype == dtype and not self.sharding.offloads
        return self.shard if shared else super()._make_flat(dtype)

    def _free(self) -> None:
        if self._flat is not self.shard:
            super()._free()

    def _gather_into(self, flat: Tensor) -> None:
        flat.copy_(self.shard, non_blocking=True)

    def _sum(self, gradient: Tensor) -> Handle | None:
        group = self.sharding.process_group
        return collectives_for(group).all_reduce(gradient, group, async_op=True)

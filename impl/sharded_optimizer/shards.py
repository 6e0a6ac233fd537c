"""Flat shards: parameters and gradients of a bucket each in one tensor, of which every rank owns an equal slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Collectives, Handle

BUCKET_MB = 5
"""Of gradients that are reduce-scattered together, and parameters that are gathered so."""
IN_FLIGHT = 2
"""Reduce-scatters that are under way at once, each with buffers of its own."""


@dataclass(eq=False)
class Segment:
    """The part of one parameter that this rank owns, `parameter.flatten()[start:stop]`; `shard` is its memory."""

    parameter: nn.Parameter
    start: int
    stop: int
    shard: nn.Parameter  # (stop - start,)

    def take_gradient(self) -> None:
        """The shard's gradient is that part of the parameter's, or None as that is; nothing is copied."""
        grad = self.parameter.grad
        self.shard.grad = None if grad is None else grad.reshape(-1)[self.start : self.stop]


class ShardedBucket:
    """Parameters of one group and dtype that are communicated together: they become views into one flat tensor.

    It is padded to a multiple of the ranks, so that all slices are of `size` elements. Cut to the element, and with no
    regard to where a parameter ends, no rank has more than another, whatever the parameters' sizes are.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, collectives: Collectives) -> None:
        self.parameters = parameters
        self._group, self._collectives = group, collectives
        self.ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.sizes = [p.numel() for p in parameters]
        self.size = -(-sum(self.sizes) // self.ranks)  # elements of a rank's slice
        self.own = slice(rank * self.size, (rank + 1) * self.size)
        self.flat = torch.zeros(self.ranks * self.size, dtype=parameters[0].dtype, device=parameters[0].device)
        self._homes = self.slots(self.flat)
        for p, home in self._homes.items():
            home.copy_(p.detach())
            p.data = home
        self.segments = self._cut()
        self.missing = set(parameters)  # those whose gradient backward has yet to produce
        self.gradients: Tensor | None = None  # as `flat`, from the first gradient until they are let go of
        self._slots: dict[nn.Parameter, Tensor] = {}
        self._reduction: Handle | None = None
        self._gathering: Handle | None = None
        self.late = False  # forward ended, and nobody had waited for the updated parameters

    def slots(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of a tensor that is laid out as `flat` is, in the parameter's shape."""
        parts = flat[: sum(self.sizes)].split(self.sizes)
        return {p: part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)}

    def _cut(self) -> list[Segment]:
        """The parts of parameters in this rank's slice, in order."""
        segments, begin = [], 0  # where the parameter begins in `flat`
        for p, size in zip(self.parameters, self.sizes, strict=True):
            first, last = max(begin, self.own.start), min(begin + size, self.own.stop)
            if first < last:
                segments.append(Segment(p, first - begin, last - begin, nn.Parameter(self.flat[first:last])))
            begin += size
        return segments

    def moved(self) -> list[nn.Parameter]:
        """Parameters that no longer are where this bucket updates them."""
        return [p for p, home in self._homes.items() if p.data_ptr() != home.data_ptr()]

    def take(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient, a part of the average, into its slot, where it stays."""
        grad, scale = parameter.grad, 1 / self.ranks  # so that sums are averages
        if grad is not None and grad.numel() == self.flat.numel() and grad.is_contiguous():
            self.gradients = grad.mul_(scale).view(-1)  # it has the bucket for itself, and needs no copy
        else:
            slot = self._slot(parameter)
            if grad is None:
                slot.zero_()  # this rank's loss did not reach it
            else:
                torch.mul(grad, scale, out=slot)
            parameter.grad = slot
        self.missing.discard(parameter)

    def _slot(self, parameter: nn.Parameter) -> Tensor:
        if self.gradients is None:
            self.gradients = torch.empty_like(self.flat)
            self.gradients[sum(self.sizes) :].zero_()
            self._slots = self.slots(self.gradients)
        return self._slots[parameter]

    def reduce(self) -> None:
        """Begin the reduce-scatter."""
        for parameter in [p for p in self.parameters if p in self.missing]:
            self.take(parameter)
        assert self.gradients is not None
        own = self.gradients[self.own]
        self._reduction = self._collectives.reduce_scatter(own, self.gradients, self._group, async_op=True)

    def finish_reduction(self) -> None:
        """Wait for the average of this rank's slice, if it is under way."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def let_go_of_gradients(self) -> None:
        """The next backward begins anew."""
        self.finish_reduction()
        self.gradients, self._slots = None, {}
        self.missing = set(self.parameters)
        for p in self.parameters:
            p.grad = None

    def gather(self) -> None:
        """Begin the all-gather of the updated parameters."""
        self.late = False
        self._gathering = self._collectives.all_gather(self.flat, self.flat[self.own], self._group, async_op=True)

    def finish_gathering(self) -> None:
        """Wait for every rank's slice, if they are under way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def gathering(self) -> bool:
        """Whether an all-gather is under way."""
        return self._gathering is not None

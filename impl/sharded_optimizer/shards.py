"""Flat shards: a bucket has its parameters in one flat tensor and its gradients in another; each rank owns a slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Collectives, Handle
from impl.distributed import has_own_memory


def default_bucket_mb(device: str) -> int:
    """MB (2^20 bytes) of gradients that are reduce-scattered together, and of parameters that are all-gathered.

    On a GPU the default is DDP's bucket size. On CPU it is smaller: on two cores, a step of a model of 36 MB takes
    about as long as with ZeroRedundancyOptimizer, and a sixth longer with 25.
    """
    return 5 if device == "cpu" else 25


@dataclass(eq=False)
class Segment:
    """The part of one parameter that this rank owns: `shard` shares memory with `parameter.flatten()[start:stop]`."""

    parameter: nn.Parameter
    start: int
    stop: int
    shard: nn.Parameter  # (stop - start,)
    place: int
    """Offset of the segment in the rank's slice."""

    def view_gradient(self) -> None:
        """Make the shard's gradient a view of the parameter's, or None where that is None."""
        grad = self.parameter.grad
        self.shard.grad = None if grad is None else grad.reshape(-1)[self.start : self.stop]


class ShardedBucket:
    """Parameters of one group and dtype that are communicated together, as views into one flat tensor.

    The flat tensor is padded to a multiple of the world size, and every rank owns a slice of `size` elements. A slice
    may begin or end inside a parameter, so no rank owns more than another, whatever the parameters' sizes. `owned` has
    the bytes that each rank owns in other buckets, and is updated. It decides where the padding goes: otherwise the
    first rank would own all of many buckets of a few elements.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup, collectives: Collectives, owned: list[int]
    ) -> None:
        self.parameters = parameters
        self._group, self._collectives = group, collectives
        self.ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.sizes = [p.numel() for p in parameters]
        self.size = -(-sum(self.sizes) // self.ranks)  # elements of a rank's slice
        self.own = slice(rank * self.size, (rank + 1) * self.size)
        self._begin = self._place(owned)
        self.flat = torch.zeros(self.ranks * self.size, dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = self.slots(self.flat)
        for p, view in self._views.items():
            view.copy_(p.detach())
            p.data = view
        self.segments = self._make_segments()
        self.missing = set(parameters)  # parameters whose gradient backward has yet to produce
        self.gradients: Tensor | None = None  # laid out as `flat`, from a step's first gradient until they are freed
        self._slots: dict[nn.Parameter, Tensor] = {}
        self._reduction: Handle | None = None
        self._gathering: Handle | None = None
        self.late = False  # the last forward ended without waiting for the updated parameters

    def collect(self, parameter: nn.Parameter) -> None:
        """Divide the parameter's gradient by the world size and move it into its slot; `.grad` becomes the slot."""
        grad, scale = parameter.grad, 1 / self.ranks  # so that sums are averages
        alone = grad is not None and grad.numel() == self.flat.numel() and grad.is_contiguous()
        if grad is not None and alone and has_own_memory(grad):
            self.gradients = grad.mul_(scale).view(-1)  # the only gradient of its bucket needs no copy
        else:
            slot = self._slot(parameter)
            if grad is None:
                slot.zero_()  # this rank's loss did not reach the parameter
            else:
                torch.mul(grad, scale, out=slot)
            parameter.grad = slot
        self.missing.discard(parameter)

    def reduce(self) -> None:
        """Start the reduce-scatter; a gradient that backward did not produce counts as zero."""
        for parameter in [p for p in self.parameters if p in self.missing]:
            self.collect(parameter)
        assert self.gradients is not None
        own = self.gradients[self.own]
        self._reduction = self._collectives.reduce_scatter(own, self.gradients, self._group, async_op=True)

    def finish_reduction(self) -> None:
        """Wait for the averages of this rank's slice."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def free_gradients(self) -> None:
        """Set every `.grad` to None, and be ready for the next backward."""
        self.finish_reduction()
        self.gradients, self._slots = None, {}
        self.missing = set(self.parameters)
        for p in self.parameters:
            p.grad = None

    def gather(self) -> None:
        """Start the all-gather of the updated parameters."""
        self.late = False
        self._gathering = self._collectives.all_gather(self.flat, self.flat[self.own], self._group, async_op=True)

    def finish_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def gathering(self) -> bool:
        return self._gathering is not None

    def slots(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part, in its shape, of a tensor that is laid out as `self.flat`."""
        parts = flat[self._begin : self._begin + sum(self.sizes)].split(self.sizes)
        return {p: part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)}

    def _slot(self, parameter: nn.Parameter) -> Tensor:
        if self.gradients is None:
            self.gradients = torch.empty_like(self.flat)
            self.gradients[: self._begin].zero_()
            self.gradients[self._begin + sum(self.sizes) :].zero_()
            self._slots = self.slots(self.gradients)
        return self._slots[parameter]

    def _place(self, owned: list[int]) -> int:
        """Return the offset of the first parameter: the padding before it minimizes the bytes of the fullest rank."""
        bounds = [(rank * self.size, (rank + 1) * self.size) for rank in range(self.ranks)]
        used, nbytes = sum(self.sizes), self.parameters[0].element_size()

        def after(begin: int) -> list[int]:
            parts = (max(0, min(begin + used, end) - max(begin, start)) for start, end in bounds)
            return [before + nbytes * part for before, part in zip(owned, parts, strict=True)]

        begin = min(range(self.ranks * self.size - used + 1), key=lambda begin: max(after(begin)))
        owned[:] = after(begin)
        return begin

    def _make_segments(self) -> list[Segment]:
        """Return the parts of parameters that lie in this rank's slice, in order."""
        segments, begin = [], self._begin  # `begin` is the parameter's offset in `flat`
        for p, size in zip(self.parameters, self.sizes, strict=True):
            first, last = max(begin, self.own.start), min(begin + size, self.own.stop)
            if first < last:
                shard, place = nn.Parameter(self.flat[first:last]), first - self.own.start
                segments.append(Segment(p, first - begin, last - begin, shard, place))
            begin += size
        return segments

    def moved(self) -> list[nn.Parameter]:
        """Parameters whose data is no longer in `flat`, where the optimizer updates it."""
        return [p for p, view in self._views.items() if p.data_ptr() != view.data_ptr()]

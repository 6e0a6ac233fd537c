"""Buckets of gradients that are communicated together, and the partition of parameters into buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LEAST_BYTES = 2**20
"""Size of a small bucket, as PyTorch's first bucket."""


class Bucket:
    """Gradients of one dtype in one flat tensor, in which each parameter has a slot; `.grad` becomes the slot.

    It has the methods of `torch.distributed.GradBucket`, so that communication hooks written for that work.
    """

    def __init__(self, index: int, last: bool, parameters: Sequence[nn.Parameter]) -> None:
        self._index = index
        self._last = last
        sizes = [p.numel() for p in parameters]
        self._flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.slots = {p: slot.view_as(p) for p, slot in zip(parameters, self._flat.split(sizes), strict=True)}
        self.missing = set(parameters)  # parameters whose gradient backward has yet to produce
        self._wait: Callable[[], Tensor] | None = None

    @torch.no_grad()  # gradients may have a graph
    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the gradient into its slot, so that further backward passes add to it there."""
        slot = self.slots[parameter]
        if parameter.grad is not None and parameter.grad is not slot:
            parameter.grad = slot.copy_(parameter.grad)

    @torch.no_grad()
    def collect(self, parameter: nn.Parameter, scale: float) -> None:
        """Write the gradient times `scale` into its slot, in one pass; no gradient counts as zero."""
        slot = self.slots[parameter]
        if parameter.grad is None:
            slot.zero_()  # this rank's loss did not reach the parameter
        else:
            torch.mul(parameter.grad, scale, out=slot)
        parameter.grad = slot
        self.missing.discard(parameter)

    def launch(self, scale: float, reduce: Callable[[Bucket], Callable[[], Tensor]]) -> None:
        """Start the reduction with `reduce(bucket)`, which returns a function that waits for the result."""
        for parameter in list(self.missing):
            self.collect(parameter, scale)
        self._wait = reduce(self)

    def finish(self) -> None:
        """Wait until the gradients are the result of the reduction, if one was launched."""
        if self._wait is not None:
            self.set_buffer(self._wait())
            self._wait = None
            self.missing = set(self.slots)

    def index(self) -> int:
        """Place among the buckets, in the order of their reductions."""
        return self._index

    def is_last(self) -> bool:
        """True if this bucket is reduced last."""
        return self._last

    def buffer(self) -> Tensor:
        """The gradients of all its parameters end to end, as one 1-D tensor."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace all gradients by `tensor`, as large as the buffer and of any dtype."""
        if tensor is not self._flat:
            self._flat.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The slots, one gradient per parameter."""
        return list(self.slots.values())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of their slots."""
        return list(self.slots)


def partition(
    parameters: Sequence[nn.Parameter], bucket_bytes: float, least_bytes: float = LEAST_BYTES
) -> list[list[nn.Parameter]]:
    """Cut parameters, given in the order in which their gradients arrive, into runs of one dtype, one for each bucket.

    A run has at most `bucket_bytes`, unless a single parameter has more. Runs are shorter at both ends. At the start
    none has more than all before it together, so that communication begins early. At the end none has more than half of
    what is left, so that little is left to communicate after backward (guided self-scheduling, Polychronopoulos and
    Kuck, 1987). Neither rule makes a run shorter than `least_bytes`; with `least_bytes=bucket_bytes` neither applies.
    """
    total, before = sum(map(_bytes, parameters)), 0
    runs: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        run = filling.setdefault(parameter.dtype, [])
        room = min(bucket_bytes, max(least_bytes, min(before, (total - before) / 2)))
        if run and sum(map(_bytes, run)) + _bytes(parameter) > room:
            runs.append(run)
            before += sum(map(_bytes, run))
            filling[parameter.dtype] = run = []
        run.append(parameter)
    return [*runs, *filling.values()]


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()

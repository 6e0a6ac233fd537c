"""Buckets: gradients that are communicated together, each in its slot of one flat tensor, and what goes into each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LEAST_BYTES = 2**20
"""A bucket's size where a small one is wanted, as that of PyTorch's first."""


class Bucket:
    """Gradients of one dtype that live in one flat tensor: each `parameter.grad` is, once taken, its slot there.

    It offers what `torch.distributed.GradBucket` does, so that communication hooks written for that take it.
    """

    def __init__(self, index: int, last: bool, parameters: Sequence[nn.Parameter]) -> None:
        self._index = index
        self._last = last
        sizes = [p.numel() for p in parameters]
        self._flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.slots = {p: slot.view_as(p) for p, slot in zip(parameters, self._flat.split(sizes), strict=True)}
        self.missing = set(parameters)  # those whose gradient backward has yet to produce
        self._arrive: Callable[[], Tensor] | None = None

    def keep(self, parameter: nn.Parameter) -> None:
        """Have further backward passes accumulate straight into the slot."""
        slot = self.slots[parameter]
        if parameter.grad is not None and parameter.grad is not slot:
            parameter.grad = slot.copy_(parameter.grad)

    def take(self, parameter: nn.Parameter, scale: float) -> None:
        """Put the gradient times `scale` into its slot, in one pass wherever it lies; none counts as zero."""
        slot = self.slots[parameter]
        if parameter.grad is None:
            slot.zero_()  # this rank's loss did not reach it
        else:
            torch.mul(parameter.grad, scale, out=slot)
        parameter.grad = slot
        self.missing.discard(parameter)

    def launch(self, scale: float, reduce: Callable[[Bucket], Callable[[], Tensor]]) -> None:
        """Begin the reduction; what `reduce` returns waits for its result."""
        for parameter in list(self.missing):
            self.take(parameter, scale)
        self._arrive = reduce(self)

    def finish(self) -> None:
        """Return when the gradients are the result of the reduction, if one is under way."""
        if self._arrive is not None:
            self.set_buffer(self._arrive())
            self._arrive = None
            self.missing = set(self.slots)

    def index(self) -> int:
        """Place among the buckets, in the order of their reductions."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self._last

    def buffer(self) -> Tensor:
        """The flat tensor of all gradients, one-dimensional."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace all gradients by `tensor`, as large as the buffer and of any dtype."""
        if tensor is not self._flat:
            self._flat.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """Each parameter's slot."""
        return list(self.slots.values())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of their slots."""
        return list(self.slots)


def partition(
    parameters: Sequence[nn.Parameter], bucket_bytes: float, least_bytes: float = LEAST_BYTES
) -> list[list[nn.Parameter]]:
    """Parameters, in the order in which their gradients come, in runs of one dtype of at most `bucket_bytes`.

    Runs are short at both ends: communication begins early when no run holds more than went before it, and little of
    it is left after backward when none holds more than half of what is to come (as in guided self-scheduling,
    Polychronopoulos and Kuck, 1987). Neither makes one shorter than `least_bytes`, with `bucket_bytes` of which all
    are as long as can be; a parameter larger than a run has its own.
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

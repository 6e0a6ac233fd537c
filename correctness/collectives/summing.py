"""Collectives on numbers that every rank can compute, and a plain description of wrong results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Inputs = Callable[[int, int], Tensor]
"""`inputs(rank, elements)` returns that rank's one-dimensional input."""


def small_integers(dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw integers so small that their sums are exact in every dtype; without a sign, sums that need all its bits.
    Complex ones have as many digits as their dtype has room for."""
    low, high = -8, 8
    if dtype == torch.uint8:
        high = 256 // dist.get_world_size()
        low = high // 2

    def draw(rank: int, elements: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        drawn = torch.randint(low, high, (elements,), generator=generator)
        return drawn.to(dtype) * (1 + 2**-30 + 2j) if dtype.is_complex else drawn.to(dtype)

    return draw


def largest(dtype: torch.dtype) -> Tensor:
    """Infinity, or the largest integer: outputs are filled with it, so that elements show that are not written, or
    that something is added to."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.tensor(torch.iinfo(dtype).max if is_integer else torch.inf, dtype=dtype)


class Call:
    """One collective on this rank: its tensors and expected result. `elements`: size of the smaller tensor, or of an
    all-reduce's. `in_place`: the smaller tensor is this rank's part of the larger one. `gaps`: the tensors are
    disjoint views of one buffer with so many elements before, between and after them; `swapped` reverses their
    order."""

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        elements: int,
        device: str,
        *,
        group: dist.ProcessGroup | None = None,
        in_place: bool = False,
        gaps: Sequence[int] = (),
        swapped: bool = False,
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.name, self.group, ranks, rank = name, group, len(members), dist.get_rank(group)
        self.terms = [inputs(other, ranks * elements if name == "reduce_scatter" else elements) for other in members]
        mine = self.terms[rank].to(device, copy=True)
        own = slice(rank * elements, (rank + 1) * elements)
        self.before: Tensor | None = None
        self.own = self.terms[rank]
        self.around: list[Tensor] = []
        if name == "all_reduce":
            self.tensors = [mine]
        else:
            size = elements if name == "reduce_scatter" else ranks * elements
            output = largest(mine.dtype).to(device).repeat(size)
            if in_place and name == "reduce_scatter":
                output = mine[own]
            elif in_place:
                mine = output[own].copy_(mine)
            else:
                self.before = self.terms[rank]
            self.tensors = [output, mine]
        if name == "reduce_scatter":
            self.terms = [term[own] for term in self.terms]
        if gaps:
            self._move_into_one_buffer(gaps, swapped)

    def _move_into_one_buffer(self, gaps: Sequence[int], swapped: bool) -> None:
        around = [largest(self.own.dtype).repeat(gap).to(self.tensors[0].device) for gap in gaps]
        order = self.tensors[::-1] if swapped else self.tensors
        between = [each for pair in zip(around, order, strict=False) for each in pair] + [around[len(order)]]
        views = [*torch.cat(between).split([each.numel() for each in between])]
        self.around, self.tensors = views[::2], views[1::2][:: -1 if swapped else 1]

    def start(self, target: Any, async_op: bool = False) -> Any:
        """Start the collective; return its handle if it is asynchronous."""
        handle = getattr(target, self.name)(*self.tensors, self.group, async_op=async_op)
        if async_op and not callable(getattr(handle, "wait", None)):
            raise TypeError(f"{self} with async_op=True returned {handle!r}, and no handle with a wait()")
        return handle

    def __str__(self) -> str:
        result = self.tensors[0]
        what = f"{self.name} of {result.numel()} {str(result.dtype).removeprefix('torch.')}"
        return what + (f" on ranks {dist.get_process_group_ranks(self.group)}" if self.group else "")

    @property
    def expected(self) -> Tensor:
        """The expected result, on the CPU; floating point in float64."""
        if self.name == "all_gather":
            return torch.cat(self.terms)
        wide = torch.float64 if self.terms[0].is_floating_point() else self.terms[0].dtype
        return torch.stack(self.terms).sum(0, dtype=wide)

    @property
    def bound(self) -> Tensor:
        """Error bound of a sum: n - 1 additions are rounded (Higham, Accuracy and Stability, 4.2)."""
        if self.name == "all_gather" or not self.terms[0].is_floating_point():
            return torch.zeros(())
        number, additions = torch.finfo(self.terms[0].dtype), len(self.terms) - 1
        unit = additions * number.eps / 2 * (2 if number.dtype == "float64" else 1)  # the expected value is rounded too
        tiny = additions * number.smallest_normal * number.eps
        return unit / (1 - unit) * torch.stack(self.terms).double().abs().sum(0) + tiny

    def wrong(self, result: Tensor | None = None) -> list[str]:
        """Describe errors in the result, changes of an input that must stay, and writes outside the tensors."""
        found, expected = (self.tensors[0] if result is None else result).detach().cpu().flatten(), self.expected
        bound = torch.where(expected.isfinite(), self.bound, 0)
        bad = ~(((found.to(expected.dtype) - expected).abs() <= bound) | _same(found, expected))
        lines = []
        if bad.any():
            i = int(bad.nonzero()[0])
            found_there = f"found {found[i].item()!r}, expected {expected[i].item()!r} at [{i}]"
            if found[i] == largest(found.dtype):
                found_there = f"not written: [{i}], expected {expected[i].item()!r}"
            elif self.name == "all_reduce" and torch.equal(found[bad], self.own[bad]):
                found_there = f"they are still this rank's own; {found_there}"
            lines.append(f"{self}: {int(bad.sum())} of {bad.numel()} elements are wrong; {found_there}")
        if self.before is not None and not _same(self.tensors[1].cpu(), self.before).all():
            lines.append(f"{self}: it changes its input")
        if any((each != largest(each.dtype)).any() for each in self.around):
            sizes = [each.numel() for each in self.around]
            lines.append(f"{self}: it writes around its tensors, views of one buffer with gaps of {sizes}")
        return lines


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Where both are the same number, or none."""
    return (one == other) | (one.isnan() & other.isnan())

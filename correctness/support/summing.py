"""Collectives on numbers that every rank knows, and what is wrong with their results, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

Inputs = Callable[[int, int], Tensor]
"""`inputs(rank, elements)` is that rank's input, in one dimension."""


def small_integers(dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Whose sums are exact in every dtype."""

    def draw(rank: int, elements: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randint(-8, 8, (elements,), generator=generator).to(dtype)

    return draw


def largest(dtype: torch.dtype) -> Tensor:
    """The largest number that the dtype has: an output begins with it, so that what is not written shows."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return torch.tensor(limits.max, dtype=dtype)


class Call:
    """One collective on this rank: its tensors, and what must come of them. `elements` of the smaller tensor, or of an
    all-reduce's. `in_place`: the smaller tensor is this rank's part of the larger one.
    """

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        elements: int,
        device: str,
        *,
        group: dist.ProcessGroup | None = None,
        in_place: bool = False,
    ) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.name, self.group, ranks, rank = name, group, len(members), dist.get_rank(group)
        self.terms = [inputs(other, ranks * elements if name == "reduce_scatter" else elements) for other in members]
        mine = self.terms[rank].to(device, copy=True)
        own = slice(rank * elements, (rank + 1) * elements)
        self.before: Tensor | None = None
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

    def start(self, target: Any, async_op: bool = False) -> Any:
        return getattr(target, self.name)(*self.tensors, self.group, async_op=async_op)

    @property
    def expected(self) -> Tensor:
        """The result, on the CPU; of floating point in float64."""
        if self.name == "all_gather":
            return torch.cat(self.terms)
        wide = torch.float64 if self.terms[0].is_floating_point() else self.terms[0].dtype
        return torch.stack(self.terms).sum(0, dtype=wide)

    @property
    def bound(self) -> Tensor:
        """How far off a sum may be: n - 1 additions are rounded (Higham, Accuracy and Stability, 4.2)."""
        if self.name == "all_gather" or not self.terms[0].is_floating_point():
            return torch.zeros(())
        number, additions = torch.finfo(self.terms[0].dtype), len(self.terms) - 1
        unit = additions * number.eps / 2 * (2 if number.dtype == "float64" else 1)  # what is expected is rounded, too
        tiny = additions * number.smallest_normal * number.eps
        return unit / (1 - unit) * torch.stack(self.terms).double().abs().sum(0) + tiny

    def wrong(self, result: Tensor | None = None) -> list[str]:
        """What is wrong with the result, and with an input that must stay."""
        found, expected = (self.tensors[0] if result is None else result).detach().cpu().flatten(), self.expected
        what = f"{self.name} of {found.numel()} {str(found.dtype).removeprefix('torch.')}"
        what += f" on ranks {dist.get_process_group_ranks(self.group)}" if self.group else ""
        bad = ~((found.to(expected.dtype) - expected).abs() <= self.bound)
        lines = []
        if bad.any():
            i = int(bad.nonzero()[0])
            lines.append(
                f"{what}: {int(bad.sum())} of {bad.numel()} elements are wrong; found {found[i].item()!r}, expected "
                f"{expected[i].item()!r} at [{i}]"
            )
        if self.before is not None and not torch.equal(self.tensors[1].cpu(), self.before):
            lines.append(f"{what}: it changes its input")
        return lines


def assert_right(ranks: Sequence[Sequence[str]]) -> None:
    """Fail with what ranks found wrong: the first lines of each."""
    __tracebackhide__ = True
    said = [f"rank {rank} of {len(ranks)}, {line}" for rank, lines in enumerate(ranks) for line in lines[:3]]
    if said:
        pytest.fail("\n".join(said), pytrace=False)

"""Random modules with known gradients: every kind of parameter and buffer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.histories import one_in

SHAPES = [(), (1,), (3,), (0, 3), (4, 3), (5, 2, 3), (97,), (17, 9)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
FROZEN_DTYPES = [*DTYPES, torch.int8, torch.uint8, torch.int64]
"""Quantized weights are integers."""
LAYOUTS = ["contiguous", "contiguous", "transposed", "in the middle of a larger one"]


@dataclass(frozen=True)
class Kind:
    """Kind of a parameter. Its values are about as large as `2**exponent` on every rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layouts: tuple[str, ...]
    """Memory layout on each rank of the world."""
    frozen: bool
    inner: bool
    """True if the parameter belongs to the submodule."""
    exponent: int

    def __str__(self) -> str:
        layouts = " or ".join(layout for layout in dict.fromkeys(self.layouts) if layout != "contiguous")
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}{layouts and f' ({layouts})'}"


@st.composite
def kinds(draw: st.DrawFn, ranks: int, *, gaps: bool, vary_strides: bool, narrow: bool) -> list[Kind]:
    """Draw two to eight kinds; the first in each module is trainable. `gaps`: strides may have them. `narrow`: numbers
    that every dtype can represent."""
    found: list[Kind] = []
    every = [*LAYOUTS, "strided"] if gaps else LAYOUTS
    for i in range(draw(st.integers(2, 8))):
        frozen = i > 1 and draw(one_in(5))
        dtype = draw(st.sampled_from(FROZEN_DTYPES if frozen else DTYPES))
        largest = {torch.float64: 300, torch.float16: 6}.get(dtype, 60)
        layouts = [draw(st.sampled_from(every))] * ranks
        if vary_strides and draw(one_in(3)):
            layouts = [draw(st.sampled_from(every)) for _ in range(ranks)]
        exponent = draw(st.sampled_from([0, 0, 1, 3] if narrow else [0, 0, 3, -largest, largest]))
        found.append(Kind(draw(st.sampled_from(SHAPES)), dtype, (*layouts,), frozen, i % 2 == 1, exponent))
    return found


def has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def numbers(seed: str, kind: Kind) -> Tensor:
    """Numbers drawn from the seed alone, equal on every rank."""
    generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**62))
    if not has_gradients(kind.dtype):
        return torch.randint(100, kind.shape, generator=generator).to(kind.dtype)
    wide = torch.complex128 if kind.dtype.is_complex else torch.float64
    return (torch.randn(kind.shape, generator=generator, dtype=wide) * 2.0**kind.exponent).to(kind.dtype)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Same values in another memory layout."""
    if layout == "transposed" and values.dim() > 1:
        backwards = [*range(values.dim())][::-1]
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == "strided" and values.dim():
        return values.new_empty(*values.shape[:-1], 2 * values.shape[-1])[..., ::2].copy_(values)
    if layout == "in the middle of a larger one":
        return values.new_empty(values.numel() + 14)[7:-7].view(values.shape).copy_(values)
    return values.clone()


def put_together(parameters: Sequence[nn.Parameter]) -> None:
    """Make the gradients of each dtype views of one buffer, as optimizers do that read them at once."""
    there = [p for p in dict.fromkeys(parameters) if p.grad is not None]
    for dtype in dict.fromkeys(p.dtype for p in there):
        own = [p for p in there if p.dtype == dtype]
        buffer = torch.cat([p.grad.detach().flatten() for p in own])
        for p, view in zip(own, buffer.split([p.numel() for p in own]), strict=True):
            p.grad = view.view(p.shape)


class Zoo(nn.Module):
    """Parameters of these kinds, some in a submodule, some under two names, and buffers. The output sums `uses`
    times given weights, so each weight is a gradient, to the bit."""

    def __init__(self, kinds: Sequence[Kind], tied: Sequence[int], start: str, rank: int) -> None:
        super().__init__()
        self.without_parameters = nn.Identity()  # a child that is passed over must not end what is done for each
        self.p, self.inner = nn.ParameterList(), nn.Module()
        self.inner.p = nn.ParameterList()
        own = []
        for i, kind in enumerate(kinds):
            values = laid_out(numbers(f"{start} {rank} {i}", kind), kind.layouts[rank])
            own.append(nn.Parameter(values, requires_grad=not kind.frozen))
            (self.inner.p if kind.inner else self.p).append(own[-1])
        for i in tied:
            (self.p if kinds[i].inner else self.inner.p).append(own[i])
        self.uses = own + [own[i] for i in tied]
        for module in (self, self.inner):
            module.register_buffer("calls", torch.tensor(100 * rank))
            module.register_buffer("seen", torch.tensor([rank, -0.0], dtype=torch.bfloat16))
            module.register_buffer("mask", torch.tensor([rank % 2 == 0, True, rank > 1]))
            module.register_buffer("rotations", torch.tensor([rank + 2j, -rank - 0.5j]))
            module.register_buffer("scratch", torch.full((2,), rank + 0.5), persistent=False)

    def forward(
        self, weights: Sequence[Tensor | None], *, order: Sequence[int], seen: float, returns: str = "a loss"
    ) -> Any:
        """Loss () in float64, in one of `RETURNS`; uses the parameters in the given order. Autocast rounds nothing."""
        self.autocast = torch.is_autocast_enabled(self.calls.device.type)
        for module in (self, self.inner):
            module.calls += 1
            module.seen.fill_(seen)
            module.scratch = torch.full_like(module.scratch, seen)  # a new tensor each time
        products = [_product(i, self.uses[i], weights[i]) for i in order if weights[i] is not None]
        loss = sum((each.real.double().sum() for each in products), torch.zeros((), dtype=torch.float64))
        return RETURNS[returns](loss, torch.tensor([seen, 1.0], dtype=torch.float64))


def _product(i: int, parameter: Tensor, weight: Tensor) -> Tensor:
    """A product whose real part is the same either way; autograd leaves every second complex gradient as a view that is
    conjugated when it is read."""
    return parameter * weight.conj() if i % 2 else parameter.conj() * weight


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a loss": lambda loss, beside: loss,
    "a tuple": lambda loss, beside: (beside, loss),
    "a dict": lambda loss, beside: {"loss": loss, "more": [beside, None, "words"]},
}
"""Returns of a call: the loss, and a tensor beside it that needs no gradient."""


def tensors_of(returned: Any) -> tuple[Tensor, Tensor | None]:
    """The loss, and the tensor beside it."""
    if isinstance(returned, Tensor):
        return returned, None
    return (returned["loss"], returned["more"][0]) if isinstance(returned, dict) else (returned[1], returned[0])

"""Tolerance of the layers, element by element: twice what the roundings of plain code allow, against float64.

Plain code rounds each result once, and the factors of a product once each. Sums over n elements add an error of n
roundings of float32, or of the dtype itself where it is wider, to each of their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from correctness.layers.mistakes import mistakes
from correctness.layers.operations import Inputs, results
from correctness.support.likeness import likeness, worst_element
from impl.layers import EagerLayers

TIMES = 2


def assert_as_accurate_as_eager(layers: Any, inputs: Inputs, times: float = TIMES, when: str = "") -> None:
    """Check results and gradients, their shapes and dtypes."""
    assert_accurate(results(layers, inputs), inputs, times, when)


def assert_accurate(found: Mapping[str, Tensor], inputs: Inputs, times: float = TIMES, when: str = "") -> None:
    """Check some of the results of `inputs`."""
    wide = inputs.to(torch.float64)
    exact, owed = results(EagerLayers, wide), rounding(inputs)
    for name, value in found.items():
        dtype = _dtype(inputs, name)
        assert value.dtype == dtype, f"{when}{name} is {value.dtype}, expected {dtype}"
        shape = tuple(exact[name].shape)
        assert value.shape == shape, f"{when}{name} is {tuple(value.shape)}, expected {shape}"
        excess = (value.double() - exact[name]).abs() / (times * owed[name])
        if not (excess <= 1).all():
            known = {how: partial(_result, wrong, name, wide) for how, wrong in mistakes(inputs).items()}
            where = worst_element(value, exact[name])
            like = likeness(value, exact[name], known)
            ratio = excess.nan_to_num(torch.inf).max()
            raise AssertionError(f"{when}{name}: an error is {ratio:.3g} times what is allowed; {where}{like}")


def _result(wrong: Callable[[Inputs], dict[str, Tensor]], name: str, inputs: Inputs) -> Tensor:
    return wrong(inputs)[name]


def _dtype(inputs: Inputs, name: str) -> torch.dtype:
    first, *_ = inputs.tensors.values()
    return inputs.tensors["weight"].dtype if name == "grad_weight" else first.dtype


def rounding(inputs: Inputs) -> dict[str, Tensor]:
    """The error of each element of each result that the roundings of plain code explain, in float64."""
    first, *_ = inputs.tensors.values()
    info = torch.finfo(first.dtype)
    summing = torch.finfo(torch.promote_types(first.dtype, torch.float32)).eps
    wide = inputs.to(torch.float64)
    least = info.smallest_normal * info.eps  # the error of numbers that are subnormal
    of = {"swiglu": _of_swiglu, "rotary": _of_rotary}.get(inputs.operation, _of_norm)
    owed = of(wide, info.eps, summing, least)
    return {name: x + least for name, x in owed.items()}


def _of_norm(inputs: Inputs, eps: float, summing: float, least: float) -> dict[str, Tensor]:
    x, weight, grad = inputs.tensors["x"], inputs.tensors["weight"], inputs.grads["normed"]
    adds = "residual" in inputs.tensors
    total = x + inputs.tensors["residual"] if adds else x
    dim, rows = x.shape[-1], max(1, x.numel() // x.shape[-1])
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + inputs.eps)
    # The sum, rounded, is one factor more, and moves the scale by as much.
    each = (3 if adds else 1) * eps + (dim + 4) * summing
    normed = (total * scale).abs()
    of_normed = (grad * weight).abs()
    terms = scale * (of_normed + normed * (of_normed * normed).mean(-1, keepdim=True))
    of_x = each * terms + least * scale  # of a factor that is subnormal
    products = (grad * normed).abs().reshape(-1, dim)
    # In half precision a factor of each product may be rounded, at random; the sum is rounded once, in the worst case.
    typical = each * products.square().sum(0).sqrt()
    exact = (grad * total * scale).reshape(-1, dim).sum(0).abs()
    of_weight = eps * exact + typical + (rows + dim) * summing * products.sum(0)
    owed = {"normed": each * normed * weight.abs(), "grad_x": of_x, "grad_weight": of_weight}
    if adds:
        of_both = of_x + eps * inputs.grads["total"].abs()
        owed |= {"total": eps * total.abs(), "grad_x": of_both, "grad_residual": of_both}
    return owed


def _of_swiglu(inputs: Inputs, eps: float, summing: float, least: float) -> dict[str, Tensor]:
    gate, up, grad = inputs.tensors["gate"], inputs.tensors["up"], inputs.grads["gated"]
    each = eps + (4 + gate.abs()) * summing  # the exponential of a number is off by as many roundings as it is large
    sigmoid = gate.sigmoid()
    silu = (gate * sigmoid).abs()
    slope = sigmoid * (1 + gate.abs() * (1 - sigmoid))
    # A sigmoid that is subnormal may be zero, as its exponential overflows; another factor may be subnormal.
    lost = gate.abs() * torch.finfo(torch.float32 if summing > 1e-10 else torch.float64).smallest_normal
    return {
        "gated": (each * silu + lost + least) * up.abs(),
        "grad_gate": (each * slope + lost) * (grad * up).abs() + least * (1 + slope),
        "grad_up": (each * silu + lost + least) * grad.abs(),
    }


def _of_rotary(inputs: Inputs, eps: float, summing: float, least: float) -> dict[str, Tensor]:
    cos, sin = inputs.tensors["cos"].abs(), inputs.tensors["sin"].abs()

    def owed(x: Tensor) -> Tensor:
        even, odd = x.abs()[..., 0::2], x.abs()[..., 1::2]
        terms = torch.stack((even * cos + odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return (eps + 4 * summing) * terms

    of_results = {f"turned_{name}": owed(inputs.tensors[name]) for name in "qk"}
    return of_results | {f"grad_{name}": owed(inputs.grads[f"turned_{name}"]) for name in "qk"}

"""Rates of a device that was calibrated: the model of `rates`, corrected by what single operators took there.

An operator takes the model's seconds times a factor: measured seconds over the model's, between the nearest sizes that
were measured of this operator, or else of its kind (Shepard, "A two-dimensional interpolation function for
irregularly-spaced data", 1968). Where nothing of its kind was measured in that dtype, the factor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shardmark.meter.hardware import COLLECTIVES, Hardware
from shardmark.predict.simulation.costs import Cost, Product, kind_of_work
from shardmark.predict.simulation.rates import GPU

Size = tuple[float, ...]
"""A product's (batch, m, n, k); attention's (bytes, FLOPs); another operator's (bytes,); a collective's (ranks, bytes).
"""
NEIGHBOURS = {1: 2, 2: 3, 4: 4}
"""The number of nearest sizes that a factor lies between, by the number of dimensions."""


def rates_of(hardware: Hardware, ranks: int = 1) -> GPU | None:
    """The hardware's rates; None where they are not known, as those of `cpu`, or of a link that no ranks measured."""
    link = hardware.link if ranks <= hardware.devices_per_node else hardware.network
    if math.isnan(hardware.bandwidth) or (ranks > 1 and math.isnan(link)):
        return None
    return Measured(hardware) if hardware.measured else GPU(hardware)


class Measured(GPU):
    """`Rates` of a device whose file has measured times."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self._factors: dict[tuple[str, str], dict[Size, list[float]]] = {}
        """Logarithms of factors by size, for each operator or kind and each dtype."""
        self._known: dict[tuple[tuple[str, str], Size], float] = {}
        for dtype, name, size, seconds in timings(hardware):
            if dtype == COLLECTIVES:
                model = super().collective(name, int(size[1]), range(int(size[0])))
                keys = [(dtype, name)]
            else:
                cost = cost_of_size(name, dtype, size)
                model = super().seconds(cost)
                keys = [(dtype, each) for each in dict.fromkeys((name, kind(cost)))]
            for key in keys:
                self._factors.setdefault(key, {}).setdefault(size, []).append(math.log(seconds / model))

    def seconds(self, cost: Cost) -> float:
        dtype = str(cost.dtype).removeprefix("torch.")
        model, size = super().seconds(cost), size_of(cost)
        for key in ((dtype, cost.name), (dtype, kind(cost))):
            if key in self._factors and len(next(iter(self._factors[key]))) == len(size):
                return model * self._factor(key, size)
        return model

    def collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        model, key = super().collective(name, nbytes, ranks), (COLLECTIVES, name)
        if len(ranks) == 1 or not nbytes or key not in self._factors:
            return model
        return model * self._factor(key, (float(len(ranks)), float(nbytes)))

    def _factor(self, key: tuple[str, str], size: Size) -> float:
        if (key, size) not in self._known:
            self._known[key, size] = math.exp(_between(self._factors[key], size))
        return self._known[key, size]


def _between(values: dict[Size, list[float]], size: Size) -> float:
    """The value at a size: the mean of those at the nearest sizes, weighted by 1 / distance² in logarithms."""
    near = sorted((math.dist(_logarithms(each), _logarithms(size)), each) for each in values)
    near = near[: NEIGHBOURS[len(size)]]
    if near[0][0] < 1e-9:
        near = near[:1]
    weights = [1 / max(distance, 1e-9) ** 2 for distance, _ in near]
    means = [sum(values[each]) / len(values[each]) for _, each in near]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)


def _logarithms(size: Size) -> list[float]:
    return [math.log(max(each, 1.0)) for each in size]


def timings(hardware: Hardware) -> Iterator[tuple[str, str, Size, float]]:
    """Each measured time of the hardware's file: dtype or COLLECTIVES, name, size, seconds."""
    for dtype, table in hardware.measured.items():
        for name, rows in table.items():
            for *size, seconds in rows:
                yield dtype, name, tuple(size), seconds


def size_of(cost: Cost) -> Size:
    """The size by which an operator's time is looked up."""
    if len(cost.products) == 1:
        [product] = cost.products
        return float(product.batch), float(product.m), float(product.n), float(product.k)
    return (cost.nbytes, cost.flops) if cost.flops else (cost.nbytes,)


def cost_of_size(name: str, dtype: str, size: Size) -> Cost:
    """The work of an operator of that size; a product's bytes are those of its three matrices."""
    scalar: torch.dtype = getattr(torch, dtype)
    if len(size) == 4:
        batch, m, n, k = map(int, size)
        nbytes = scalar.itemsize * batch * (m * k + k * n + m * n)
        product = Product(batch, m, n, k)
        return Cost(scalar, 2.0 * batch * m * n * k, float(nbytes), (product,), **kind_of_work(name))
    return Cost(scalar, size[1] if len(size) == 2 else 0.0, size[0], **kind_of_work(name))


def kind(cost: Cost) -> str:
    """The kind of operator: those of one kind are alike where an operator itself was not measured."""
    if cost.flops:
        return "products" if cost.products else "attention"
    return "reductions" if cost.reduces else "scattered" if cost.scattered else "elements"

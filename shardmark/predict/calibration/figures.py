"""Make hardware of measured times: each figure from the times that show it, by the model that predicts with it.

The figures of `Reached` are those at the largest sizes. All single times are kept beside them, as `Hardware.measured`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from shardmark.meter.hardware import COLLECTIVES, DTYPES, Hardware, Reached
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.measured import kind, size_of
from shardmark.predict.simulation.rates import GPU

LARGEST = 3
"""A figure is the median of what this many of the largest points show."""
PLAIN = ("add", "mul", "copy_", "clone", "add_", "mul_")
"""Operators that take the time of their bytes."""
LEAST_SECONDS = 1e-7
"""Least seconds of a launch or a collective: a figure is positive."""


@dataclass
class Timings:
    """Seconds that were measured."""

    operators: list[tuple[Cost, float]] = field(default_factory=list)
    collectives: list[tuple[str, int, int, float]] = field(default_factory=list)
    """Name, ranks, bytes, seconds."""
    flops: dict[str, float] = field(default_factory=dict)
    """FLOP/s of one large product, by dtype."""
    bandwidth: float = math.nan
    """Bytes/s of one large copy."""


def hardware_of(base: Hardware, peaks: Mapping[str, float], found: Timings) -> Hardware:
    """`base` with the measured rates. `peaks` are the data sheet's FLOP/s, where it is known."""
    flops = {dtype: rate for dtype, rate in (_fastest(found) | dict(peaks)).items() if dtype in DTYPES}
    kernel = min((seconds for _, seconds in found.operators), default=Reached().kernel)
    plain = _of_bytes(found, kernel, lambda cost: cost.name in PLAIN) or found.bandwidth
    on = replace(base, flops=flops, bandwidth=max(found.bandwidth, plain), measured=table(found))
    reached = Reached(products=dict.fromkeys(DTYPES, 1.0), kernel=kernel)
    reached = replace(reached, bandwidth=_share(plain / on.bandwidth))
    shares: dict[str, float] = {}
    for name, of in (("reduction", "reductions"), ("scattered", "scattered")):
        if rate := _of_bytes(found, kernel, partial(_is_of, of)):
            shares[name] = _share(rate / (on.bandwidth * reached.bandwidth))
    rates = GPU(replace(on, bandwidth=math.inf, reached=replace(reached, attention=1.0, narrow=1.0)))
    products = Reached().products
    narrow: list[float] = []
    attention: list[float] = []
    for dtype in flops:
        of_dtype = [(cost, seconds) for cost, seconds in found.operators if str(cost.dtype) == f"torch.{dtype}"]
        wide = _of_flops(of_dtype, rates, kernel, lambda cost: len(cost.products) == 1 and not _is_narrow(cost))
        products[dtype] = _share(wide or found.flops.get(dtype, flops[dtype]) / flops[dtype])
        for parts, which in ((narrow, _is_narrow), (attention, partial(_is_of, "attention"))):
            if share := _of_flops(of_dtype, rates, kernel, which):
                parts.append(share / products[dtype])
    shares |= {name: _share(median(parts)) for name, parts in (("narrow", narrow), ("attention", attention)) if parts}
    return _with_links(replace(on, reached=replace(reached, products=products, **shares)), found)


def _fastest(found: Timings) -> dict[str, float]:
    """The largest FLOP/s by dtype. On a loaded machine that is a single operator's, as its waits are taken off."""
    flops = dict(found.flops)
    for cost, seconds in found.operators:
        dtype = str(cost.dtype).removeprefix("torch.")
        if cost.products and dtype in flops:
            flops[dtype] = max(flops[dtype], cost.flops / seconds)
    return flops


def _is_of(of: str, cost: Cost) -> bool:
    return kind(cost) == of


def _is_narrow(cost: Cost) -> bool:
    return len(cost.products) == 1 and cost.products[0].is_narrow


def _share(part: float) -> float:
    return min(1.0, part)


def _of_bytes(found: Timings, kernel: float, which: Callable[[Cost], bool]) -> float | None:
    """The bytes/s of the largest of those operators."""
    points = sorted((cost.nbytes, seconds) for cost, seconds in found.operators if which(cost) and not cost.flops)
    rates = [nbytes / max(seconds - kernel, 1e-12) for nbytes, seconds in points[-LARGEST:]]
    return median(rates) if rates else None


def _of_flops(
    points: Iterable[tuple[Cost, float]], rates: GPU, kernel: float, which: Callable[[Cost], bool]
) -> float | None:
    """The fraction of the FLOP/s that the largest of those operators reach, in the model's tiles."""
    largest = sorted(((cost.flops, cost, s) for cost, s in points if which(cost)), key=lambda each: each[0])[-LARGEST:]
    shares = [(rates.seconds(cost) - kernel) / max(seconds - kernel, 1e-12) for _, cost, seconds in largest]
    return median(shares) if shares else None


def _with_links(on: Hardware, found: Timings) -> Hardware:
    """The hardware with the link and the latency that all-reduces on a ring show."""
    points = sorted(
        (nbytes, seconds, ranks) for name, ranks, nbytes, seconds in found.collectives if name == "all_reduce"
    )
    if len(points) < 2:
        return on
    (small, least, ranks), (smaller, shorter, _), (large, most, _) = points[0], points[-2], points[-1]
    sent = 2 * (ranks - 1) / ranks
    link = sent * (large - smaller) / max(most - shorter, 1e-12)
    known = on.link if on.link > 0 else link
    latency = 0.0 if math.isnan(on.latency) else on.latency
    collective = max(least - 2 * (ranks - 1) * latency - sent * small / link, LEAST_SECONDS)
    reached = replace(on.reached, link=_share(link / known), collective=collective)
    return replace(on, link=max(known, link), latency=latency, reached=reached)


def with_launches(on: Hardware, forward: float, backward: float) -> Hardware:
    """The hardware with the host's seconds for an operator of forward and of backward."""
    launch, backward_launch = (max(each, LEAST_SECONDS) for each in (forward, backward))
    return replace(on, reached=replace(on.reached, launch=launch, backward_launch=backward_launch))


def table(found: Timings) -> dict[str, dict[str, list[list[float]]]]:
    """`Hardware.measured`: the median of those of equal size."""
    seconds: dict[tuple[str, str, tuple[float, ...]], list[float]] = {}
    for cost, each in found.operators:
        if len(cost.products) < 2:
            key = str(cost.dtype).removeprefix("torch."), cost.name, size_of(cost)
            seconds.setdefault(key, []).append(each)
    for name, ranks, nbytes, each in found.collectives:
        seconds.setdefault((COLLECTIVES, name, (ranks, nbytes)), []).append(each)
    tables: dict[str, dict[str, list[list[float]]]] = {}
    for (dtype, name, size), all_of_it in sorted(seconds.items()):
        rows = tables.setdefault(dtype, {}).setdefault(name, [])
        if not rows or len(rows[0]) == len(size) + 1:
            rows.append([*map(round, size), float(f"{median(all_of_it):.4g}")])
    return tables


def per_launch(measured: Sequence[float], computing: float, launches: int, on_host: bool) -> float:
    """Seconds of a launch in a part of a step whose operators take `computing` seconds on the device."""
    return (median(measured) - (computing if on_host else 0.0)) / launches

"""Fit the rates that devices reach and the seconds that hosts take to one half of the published times.

    python -m studies.published.fit    # writes studies/published/hosts.toml, and `reached` in hardware.toml

One rate after another is moved, in smaller and smaller steps, while the mean error in logarithms falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import numpy as np

from perf.published import UNITS
from shardmark.meter.hardware import Hardware, Reached, hardware
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.links import collective_seconds
from shardmark.predict.simulation.rates import GPU
from studies.published.reached import toml, write_reached
from studies.published.time_rows import FILES, HOSTS, Reading, ahead_of, fitted_cases, reading_of, rows
from studies.published.traces import Trace, trace

RATES = ("products.float32", "narrow", "bandwidth", "reduction", "scattered")
LINKS = ("link", "collective")
MOST = {"bandwidth": 0.92, "products.float32": 0.95}
"""Upper limits of rates: what copies, and products of large square matrices, are known to reach."""
FRACTIONS = {*RATES, *LINKS} - {"collective"}
HOST = ("launch", "backward_launch")
OPPOSITE = ("products.float32", "narrow")
"""Also moved against each other: the second multiplies the first, and only wide products tell them apart."""
STEPS = (1.3, 1.1, 1.03, 1.01)
Found = dict[str, float]


@dataclass
class Known:
    """A row of the fitted half. `cost` is the index in `Device.costs` of each of its program's operators."""

    reading: Reading
    published: float
    trace: Trace
    cost: np.ndarray


@dataclass
class Device:
    """The fitted rows of one device, and an index of its programs' costs."""

    hardware: Hardware
    costs: dict[Cost | None, int] = field(default_factory=dict)
    rows: list[Known] = field(default_factory=list)
    all_reduces: list[tuple[Reading, int, float]] = field(default_factory=list)

    def add(self, reading: Reading, published: float) -> None:
        """Add a row."""
        found = trace(reading.program, reading.on)
        cost = np.array([self.costs.setdefault(each, len(self.costs)) for each in found.costs])
        self.rows.append(Known(reading, published, found, cost))

    def error(self, rates: Found, hosts: dict[str, Found]) -> float:
        """Mean error, in logarithms, of the rows of one rank."""
        on = reaching(self.hardware, rates)
        gpu = GPU(on)
        seconds = np.array([0.0 if cost is None else gpu.seconds(cost) for cost in self.costs])
        errors = []
        for row in self.rows:
            host = hosts[row.reading.host]
            ahead = ahead_of(row.reading, on)
            parts = row.trace.seconds_of_parts(seconds[row.cost], (host["launch"], host["backward_launch"]), ahead)
            errors.append(abs(math.log(sum(parts[part] for part in row.reading.parts) / row.published)))
        return fmean(errors)

    def error_of_links(self, rates: Found) -> float:
        """Mean error, in logarithms, of all-reduces."""
        on = reaching(self.hardware, rates)
        return fmean(
            abs(math.log(collective_seconds(on, "all_reduce", nbytes, range(reading.ranks)) / published))
            for reading, nbytes, published in self.all_reduces
        )


def reaching(device: Hardware, rates: Found) -> Hardware:
    """The device with these rates of `Reached`."""
    products = Reached().products | {
        name.removeprefix("products."): rate for name, rate in rates.items() if name.startswith("products.")
    }
    others = {name: rate for name, rate in rates.items() if not name.startswith("products.")}
    return replace(device, reached=Reached(products=products, **others))


def searched(values: Found, error: Callable[[], float]) -> float:
    """Move `values` one after another while the error falls. Returns the least error."""
    least = error()
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for names in [*((name,) for name in values), *([OPPOSITE] if OPPOSITE[0] in values else [])]:
                for factor in (step, 1 / step):
                    before = dict(values)
                    for name, by in zip(names, (factor, 1 / factor), strict=False):
                        values[name] *= by
                    possible = all(values[name] <= MOST.get(name, 1.0) for name in FRACTIONS & {*names})
                    if possible and (now := error()) < least - 1e-6:
                        least, improved = now, True
                    else:
                        values.update(before)
    return least


def devices() -> dict[str, Device]:
    """The fitted half by device: programs on one device, and all-reduces."""
    found: dict[str, Device] = {}
    for file in FILES:
        for row in rows(file):
            reading = reading_of(file, row)
            if reading is None or row["case"] not in fitted_cases(file):
                continue
            device = found.setdefault(reading.on, Device(hardware(reading.on)))
            published = float(row["value"]) * UNITS[row["unit"]]
            if row["experiment"].startswith("all-reduce"):
                device.all_reduces.append((reading, 2**20 * int(row["case"].split()[0]), published))
            elif reading.ranks == 1:
                device.add(reading, published)
    return found


def main() -> None:
    """Fit, and write the results."""
    lines = [
        "# Written by `python -m studies.published.fit`: seconds of the host for an operator, in a write-up's tables."
    ]
    for name, device in devices().items():
        rates, hosts = fit(name, device)
        write(name, rates)
        for host, seconds in hosts.items():
            lines.append(f'["{host}"]\n' + "\n".join(f"{key} = {value:.3g}" for key, value in seconds.items()))
    HOSTS.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def fit(name: str, device: Device) -> tuple[Found, dict[str, Found]]:
    """Fit one device. Prints its rates; returns them and the seconds of the hosts."""
    reached = Reached()  # each fit begins with the defaults
    rates = {key: reached.products[key[9:]] if "." in key else getattr(reached, key) for key in RATES}
    hosts = {row.reading.host: dict.fromkeys(HOST, 1.5e-5) for row in device.rows}
    for _ in range(3):
        for host in hosts:
            own = replace(device, rows=[row for row in device.rows if row.reading.host == host])
            searched(hosts[host], partial(own.error, rates, hosts))
        error = searched(rates, partial(device.error, rates, hosts))
    print(f"{name}: mean error {100 * error:.1f}% of {len(device.rows)} rows", toml(rates))
    if device.all_reduces:
        links = {key: getattr(reached, key) for key in LINKS}
        error = searched(links, partial(device.error_of_links, links))
        print(f"{name}: mean error {100 * error:.1f}% of {len(device.all_reduces)} all-reduces", toml(links))
        rates |= links
    return rates, hosts


SAME_CHIP = {"a100-80gb": ("a100-40gb",), "h100-80gb": ("h100-96gb", "h100-pcie", "h200")}


def write(name: str, rates: Found) -> None:
    """Write the rates of the device, and of those with the same chip."""
    products = {key.removeprefix("products."): rate for key, rate in rates.items() if key.startswith("products.")}
    others = {key: rate for key, rate in rates.items() if not key.startswith("products.")}
    for each in (name, *SAME_CHIP[name]):
        write_reached(each, {"products": products, **others})


if __name__ == "__main__":
    main()

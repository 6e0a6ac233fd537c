"""Fit what data sheets do not say to published training steps: few numbers with a meaning, judged by other sources.

    python -m studies.published.steps_fit    # writes fitted_steps.toml, within.toml, and `reached` in hardware.toml

Numbers are moved by Gauss-Newton steps in logarithms. All rows of n by the same authors weigh as the root of n, far
rows weigh less, and each number is held near its default as far as rows say nothing about it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from shardmark.meter.hardware import Hardware, hardware
from shardmark.predict.simulation import within
from shardmark.predict.simulation.rates import GPU
from studies.published.reached import write_reached
from studies.published.recordings import Recording, Replayed, recorded
from studies.published.step_intervals import Judged, interval
from studies.published.step_rows import Published, every
from studies.published.training import Training, corners, made

DEFAULTS = {
    "a100.bfloat16": 0.75,
    "a100.attention": 0.6,
    "h100.bfloat16": 0.6,
    "h100.attention": 0.6,
    "h100-96gb.bfloat16": 0.5,
    "h100.link": 0.53,
    "network": 0.7,
    "beside": 0.9,
}
"""Where each number begins. Before a dot: the chip that it is of. H100s' `link` begins with what
`studies.published.fit` finds for all-reduces of A100s, which stay at that."""
LOOSE = 0.3
"""Standard deviation of the logarithm of a number around its default, before rows are seen."""
NOISE = 0.1
"""The same of a row around its prediction."""
FAR = 1.5
"""Residuals of so many times `NOISE` weigh half (Cauchy's weights)."""
LITTLE = 0.02
MOST = dict.fromkeys(DEFAULTS, 1.0)
ROUNDS = 6
DEVICES = ("a100-40gb", "a100-80gb", "h100-80gb", "h100-96gb", "h200")
"""Devices with the chips that the sources have."""
FITTED = Path(__file__).with_name("fitted_steps.toml")
Numbers = dict[str, float]


def reaching(on: Hardware, numbers: Numbers) -> Hardware:
    """The device with these numbers."""
    own = {}
    for name, value in numbers.items():
        of, _, key = name.rpartition(".")
        if of in ("", "a100" if on.name.startswith("a100") else "h100", on.name):
            own[key] = value  # a device's own follow its chip's
    products = on.reached.products | {"bfloat16": own.pop("bfloat16")}
    return replace(on, reached=replace(on.reached, products=products, **own))


def recordings(training: Training, on: Hardware) -> list[Recording]:
    """Recordings of the training's corners, each made once for devices with equal rules."""
    return [recording_of(each, on) for each in corners(training)]


_made: dict[object, Recording] = {}


def recording_of(training: Training, on: Hardware) -> Recording:
    key = training, on.rules
    if key not in _made:
        _made[key] = recorded(partial(made, training), training.ranks, on)
    return _made[key]


def predicted(row: Published, on: Hardware) -> Replayed:
    """The row's step on that device: seconds are those at the corners, continued in layers and micro-batches."""
    rates = GPU(on)
    found = [np.array(each.replay(rates, steps=2)) for each in recordings(row.training, on)]
    size, times = row.training.size, row.training.micro_batches
    counts = [each.size.layers for each in corners(row.training)]
    if times > 1:  # pairs of one micro-batch and two
        found = [one + (two - one) * (times - 1) for one, two in zip(found[::2], found[1::2], strict=True)]
        counts = counts[::2]
    if len(found) == 1:
        return Replayed(*found[0])
    (few, more), (low, high) = counts, found
    return Replayed(*(low + (high - low) * (size.layers - few) / (more - few)))


def fit(
    rows: Sequence[Published], start: Numbers = DEFAULTS, slopes: np.ndarray | None = None
) -> tuple[Numbers, np.ndarray]:
    """The numbers at which predictions are nearest to the rows, and the slopes there. With `slopes`, those are taken
    for the rows' own."""
    names = list(start)
    default, most = (np.log([each[name] for name in names]) for each in (DEFAULTS, MOST))
    at = np.log([start[name] for name in names])
    published = np.log([row.seconds for row in rows])
    authors = [row.authors for row in rows]
    weights = np.array([authors.count(each) ** -0.5 for each in authors])
    own = slopes
    for _ in range(ROUNDS):
        here = _logarithms(rows, _numbers(names, at))
        own = _slopes(rows, names, at, here) if slopes is None else slopes
        residual = (published - here) / NOISE
        left = (own / NOISE).T * (weights / (1 + (residual / FAR) ** 2))
        normal = left @ (own / NOISE) + np.eye(len(names)) / LOOSE**2
        step = np.linalg.solve(normal, left @ residual + (default - at) / LOOSE**2)
        before, at = at, np.minimum(at + np.clip(step, -0.3, 0.3), most)
        if np.abs(at - before).max() < 3e-3:
            break
    assert own is not None
    return _numbers(names, at), own


def without(rows: Sequence[Published], authors: str, every: Numbers, slopes: np.ndarray) -> Numbers:
    """The numbers fitted to the rows of all other authors. The slopes are those at the fit of all rows."""
    others = [i for i, row in enumerate(rows) if row.authors != authors]
    return fit([rows[i] for i in others], every, slopes[others])[0]


def _numbers(names: Sequence[str], at: np.ndarray) -> Numbers:
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def _slopes(rows: Sequence[Published], names: Sequence[str], at: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Slopes of the logarithms of predicted seconds, which are `here`, in the logarithm of each number."""
    slopes = np.zeros((len(rows), len(names)))
    for i, name in enumerate(names):
        of = name.rpartition(".")[0]
        moved = at.copy()
        moved[i] -= LITTLE
        own = [k for k, row in enumerate(rows) if of in ("", row.chip, row.on.name)]
        slopes[own, i] = (here[own] - _logarithms([rows[k] for k in own], _numbers(names, moved))) / LITTLE
    return slopes


def _logarithms(rows: Sequence[Published], numbers: Numbers) -> np.ndarray:
    return np.log([predicted(row, reaching(row.on, numbers)).seconds for row in rows])


def main() -> None:
    """Fit to all rows, and without each group of authors; write the numbers, and the devices' own."""
    rows = every()
    numbers, slopes = fit(rows)
    tables = {"every": numbers}
    tables |= {each: without(rows, each, numbers, slopes) for each in dict.fromkeys(row.authors for row in rows)}
    lines = [
        "# Written by `python -m studies.published.steps_fit`: fitted to all rows, and without those of one author."
    ]
    for name, table in tables.items():
        lines.append(f'["{name}"]\n' + "\n".join(f'"{key}" = {value:.4g}' for key, value in table.items()))
    FITTED.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    fitted.cache_clear()
    for name in DEVICES:
        own = reaching(hardware(name), numbers).reached
        halves = dict.fromkeys(("float16", "bfloat16"), own.products["bfloat16"])
        link = {} if name.startswith("a100") else {"link": own.link}
        others = {key: getattr(own, key) for key in ("attention", "network", "beside")}
        write_reached(name, {"products": halves, **others, **link})
    intervals = ["# Written by `python -m studies.published.steps_fit`: see within.py."]
    of_chips = {chip: [each for each in every_judged() if each.row.chip == chip] for chip in ("a100", "h100")}
    for name, steps in (of_chips | {"other": other_chips()}).items():
        low, high = interval(steps)
        sources = 0 if name == "other" else len({each.row.source for each in steps})
        intervals.append(f"[{name}]\nlow = {low:.2f}\nhigh = {high:.2f}\nrows = {len(steps)}\nsources = {sources}")
    within.TABLE.write_text("\n\n".join(intervals) + "\n", encoding="utf-8")


@cache
def fitted() -> dict[str, Numbers]:
    """The numbers that were fitted: "every", and those without an author's rows by that author."""
    return tomllib.loads(FITTED.read_text(encoding="utf-8"))


def judged(row: Published) -> Judged:
    """The row's prediction by the numbers of other authors."""
    return Judged(row, predicted(row, reaching(row.on, fitted()[row.authors])))


@cache
def every_judged() -> list[Judged]:
    """Every row, with its figure and its prediction by numbers that its authors did not move."""
    return [judged(row) for row in every()]


@cache
def other_chips() -> list[Judged]:
    """All rows, by the numbers of another chip: those of H100s for A100s, and the other way round."""
    numbers = fitted()["every"]
    exchanged = numbers | {
        f"{to}.{key}": numbers[f"{of}.{key}"]
        for of, to in (("a100", "h100"), ("h100", "a100"), ("a100", "h100-96gb"))
        for key in ("bfloat16", "attention")
        if f"{to}.{key}" in numbers
    }
    return [Judged(row, predicted(row, reaching(row.on, exchanged))) for row in every()]


if __name__ == "__main__":
    main()

"""Lay out the outcomes as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from shardmark.meter.hardware import CONTEXT
from shardmark.predict.simulation.communicator import communicator_bytes
from shardmark.predict.simulation.rates import RATIO_WITHIN
from shardmark.predict.what_fits.outcome import Outcome
from shardmark.predict.what_fits.prediction import ModelFacts, Prediction, Refused
from shardmark.text import layout

WIDE = 140
"""Columns of a screen that has room for all figures."""
_MORE = ("of first", "step ms", "9 of 10", "tensors", "at most", "free")
"""Figures that a narrow table leaves out."""
_OF_HOST = ("host", "pinned")
"""Figures of offloaded strategies."""


def lines(model: ModelFacts, found: Sequence[Outcome], width: int = WIDE) -> Iterator[str]:
    """A table for each kind of device; one narrower than WIDE leaves out the figures of `_MORE`."""
    case = model.case
    yield f"{case.name}: {case.parameters:,} parameters in {case.dtype}. Batch on each rank; memory in GiB."
    for on, group in groupby(found, key=lambda outcome: outcome.hardware):
        outcomes = list(group)
        context = f", of which CUDA's context takes {_gib(CONTEXT)}" if on.device == "cuda" else ""
        yield ""
        yield f"{on.name}: {_gib(on.memory_bytes)}{context}"
        reasons = list(dict.fromkeys(o.found.reason for o in outcomes if isinstance(o.found, Refused)))
        rows = [_cells(outcome, outcomes[0], reasons) for outcome in outcomes]
        dropped = (*_OF_HOST * (not any(row["host"] for row in rows)), *_MORE * (width < WIDE))
        rows = [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]
        yield from layout(rows, left=("strategy", "fits"))
        for number, reason in enumerate(reasons, 1):
            yield f"[{number}] {reason}"
        for reason in dict.fromkeys(outcome.larger.reason for outcome in outcomes if outcome.larger):
            yield f"+ A larger batch may fit, and is not known: {reason}."
        if any(map(_made_elsewhere, outcomes)):
            yield "* Whole, the model does not fit before it is sharded: make it on the host, or on the meta device."
        if any(is_undecided(outcome, outcomes[0]) for outcome in outcomes[1:]):
            yield f"? Undecided: within a factor of {RATIO_WITHIN} of the first, by which predicted ratios may err."


def is_undecided(outcome: Outcome, first: Outcome) -> bool:
    """True where measuring could show that the strategy is faster than the first one. On one device and host the errors
    of two predictions are much alike, so their ratio errs less than either."""
    mine, best = outcome.rows_per_second, first.rows_per_second
    return outcome is not first and bool(outcome.fits and mine and best and best < RATIO_WITHIN * mine)


def _cells(outcome: Outcome, first: Outcome, reasons: list[str]) -> dict[str, str | None]:
    found, step, model = outcome.found, outcome.step, outcome.model
    known = found if isinstance(found, Prediction) else None
    mine, best = outcome.rows_per_second, first.rows_per_second
    mark = "?" * is_undecided(outcome, first)
    rate = outcome.tokens_per_second if model.tokens else mine
    return {
        "strategy": outcome.strategy.label + " *" * _made_elsewhere(outcome),
        "ranks": f"{outcome.ranks:,}",
        "batch": None if outcome.batch is None else f"{outcome.batch:,}" + "+" * (outcome.larger is not None),
        "tokens/s" if model.tokens else "rows/s": _rate(rate) + mark if rate else None,
        "of first": f"{mine / best:.0%}" if outcome.fits and mine and best else None,
        "MFU": None if outcome.mfu is None else f"{outcome.mfu:.1%}",
        "step ms": _milliseconds(step.seconds) if step else None,
        "9 of 10": "-".join(map(_milliseconds, step.interval)) if step else None,
        "tensors": _gib(known.tensors) if known else None,
        "reserved": _gib(known.reserved) if known else None,
        "at most": _gib(known.at_most) if known else None,
        "free": None if outcome.free is None else _gib(outcome.free),
        "host": _gib(known.host) if known and known.host else None,
        "pinned": _gib(known.pinned) if known and known.host else None,
        "fits": _verdict(outcome, reasons),
    }


def _verdict(outcome: Outcome, reasons: list[str]) -> str:
    """The cell "fits": yes, no, or not known with the number of the reason below."""
    says = {True: "tight" if outcome.is_tight else "yes", False: "no", None: "not known"}[outcome.fits]
    why = f" [{reasons.index(outcome.found.reason) + 1}]" if isinstance(outcome.found, Refused) else ""
    match outcome.context:
        case None:
            return says + why
        case int(size):
            return f"{says}{why}; the largest context is {size:,}"
        case reason:
            return f"{says}{why}; no other context: {reason}"


def _made_elsewhere(outcome: Outcome) -> bool:
    """True where steps fit, but the unsharded model does not fit on one device while it is made."""
    found = outcome.found
    return bool(outcome.fits) and isinstance(found, Prediction) and found.made > outcome.room


def saved(model: ModelFacts, found: Sequence[Outcome]) -> dict[str, Any]:
    """The model and every outcome, in bytes and seconds, for `--json`."""
    case = model.case
    batch = dict(zip(("batch", "context"), model.sizes, strict=True))
    firsts = {on: next(group) for on, group in groupby(found, key=lambda outcome: outcome.hardware)}
    return {
        "model": {"name": case.name, "parameters": case.parameters, "dtype": case.dtype, **batch},
        "context_bytes": CONTEXT,
        "outcomes": [
            {
                "hardware": outcome.hardware.name,
                "memory_bytes": outcome.hardware.memory_bytes,
                "strategy": str(outcome.strategy),
                "ranks": outcome.ranks,
                "batch": outcome.batch,
                **asdict(outcome.found),
                "interval": outcome.step and outcome.step.interval,
                "rows_per_second": outcome.rows_per_second,
                "tokens_per_second": outcome.tokens_per_second,
                "mfu": outcome.mfu,
                "undecided": is_undecided(outcome, firsts[outcome.hardware]),
                "communicator": communicator_bytes(outcome.hardware, outcome.ranks),
                "free": outcome.free,
                "fits": outcome.fits,
                "largest_batch": outcome.largest_batch,
                "larger": outcome.larger and outcome.larger.reason,
                "longest_context": outcome.context,
            }
            for outcome in found
        ],
    }


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _milliseconds(seconds: float) -> str:
    return _fixed(seconds * 1e3, 0 if seconds >= 0.01 else 1)


def _gib(nbytes: float) -> str:
    return _fixed(nbytes / 2**30, 1)


def _fixed(value: float, decimals: int) -> str:
    """With that many decimals, or with up to three where these would show nothing but zeros."""
    while decimals < 3 and 0 < abs(value) < 10**-decimals:
        decimals += 1
    return f"{value:,.{decimals}f}"

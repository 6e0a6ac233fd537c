"""Lay out the outcomes as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from shardmark.api.own_model import OwnModelCase
from shardmark.meter.hardware import CONTEXT
from shardmark.predict.simulation.communicator import communicator_bytes
from shardmark.predict.what_fits.advice import Outcome
from shardmark.predict.what_fits.prediction import Prediction, Refused, Sizes
from shardmark.text import layout


def lines(case: OwnModelCase, sizes: Sizes, found: Sequence[Outcome]) -> Iterator[str]:
    """A table for each kind of device."""
    rows = sizes[0]
    batch = f", a batch of {rows:,} on each rank" if isinstance(rows, int) else ""
    yield f"{case.name}: {case.parameters:,} parameters in {case.dtype}{batch}. Memory in GiB."
    for on, group in groupby(found, key=lambda outcome: outcome.hardware):
        outcomes = list(group)
        context = f", of which CUDA's context takes {_gib(CONTEXT)}" if on.device == "cuda" else ""
        yield ""
        yield f"{on.name}: {_gib(on.memory_bytes)}{context}"
        reasons = list(dict.fromkeys(o.found.reason for o in outcomes if isinstance(o.found, Refused)))
        in_step = rows * case.recipe.micro_batches if isinstance(rows, int) else rows
        yield from layout([_cells(outcome, in_step, reasons) for outcome in outcomes], left=("strategy", "fits"))
        for number, reason in enumerate(reasons, 1):
            yield f"[{number}] {reason}"
        if any(map(_made_elsewhere, outcomes)):
            yield "* Whole, the model does not fit before it is sharded: make it on the host, or on the meta device."


def _cells(outcome: Outcome, rows: int | str, reasons: list[str]) -> dict[str, str | None]:
    found = outcome.found
    known = found if isinstance(found, Prediction) else None
    step = outcome.step
    return {
        "strategy": str(outcome.strategy) + " *" * _made_elsewhere(outcome),
        "ranks": f"{outcome.ranks:,}",
        "step ms": f"{step.seconds * 1e3:,.0f}" if step else None,
        "rows/s": _rate(rows * outcome.ranks / step.seconds) if step and isinstance(rows, int) else None,
        "tensors": _gib(known.tensors) if known else None,
        "reserved": _gib(known.reserved) if known else None,
        "free": None if outcome.free is None else _gib(outcome.free),
        "fits": _verdict(outcome, reasons),
    }


def _verdict(outcome: Outcome, reasons: list[str]) -> str:
    """The cell "fits": yes, no with the change that would help, or not known with the number of the reason below."""
    says = {True: "yes", False: "no", None: "not known"}[outcome.fits]
    batch = _largest("batch", outcome.rows) + _largest("context", outcome.context)
    change = f"; {outcome.change} does" if outcome.change else ""
    why = f" [{reasons.index(outcome.found.reason) + 1}]" if isinstance(outcome.found, Refused) else ""
    return says + why + change + batch


def _largest(what: str, found: int | str | None) -> str:
    match found:
        case None:
            return ""
        case 0:
            return f"; no {what} does"
        case int(size):
            return f"; the largest {what} is {size:,}"
        case reason:
            return f"; no other {what}: {reason}"


def _made_elsewhere(outcome: Outcome) -> bool:
    """True where steps fit, but the unsharded model does not fit on one device while it is made."""
    found = outcome.found
    return bool(outcome.fits) and isinstance(found, Prediction) and found.made > outcome.room


def saved(case: OwnModelCase, sizes: Sizes, found: Sequence[Outcome]) -> dict[str, Any]:
    """The model and every outcome, in bytes, for `--json`."""
    batch = dict(zip(("batch", "context"), sizes, strict=True))
    return {
        "model": {"name": case.name, "parameters": case.parameters, "dtype": case.dtype, **batch},
        "context_bytes": CONTEXT,
        "outcomes": [
            {
                "hardware": outcome.hardware.name,
                "memory_bytes": outcome.hardware.memory_bytes,
                "strategy": str(outcome.strategy),
                "ranks": outcome.ranks,
                **asdict(outcome.found),
                "communicator": communicator_bytes(outcome.hardware, outcome.ranks),
                "free": outcome.free,
                "fits": outcome.fits,
                "change": outcome.change,
                "largest_batch": outcome.rows,
                "longest_context": outcome.context,
            }
            for outcome in found
        ],
    }


def _rate(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 100 else f"{rows:.3g}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f}"

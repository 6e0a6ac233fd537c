"""How far a measured step lies from its prediction: nine of ten published steps lie within these multiples of it.

`within.toml` has them for whole training steps by chip, of authors to whose steps no rate was fitted
(`docs/published-steps.md`), and for chips without a source. Steps that their host binds, and products in float32, are
judged by the half of `docs/published-times.md` that was held out.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.rates import WITHIN
from shardmark.predict.simulation.schedule import Step

TABLE = Path(__file__).with_name("within.toml")
OTHER = "other"
CHIPS = {"a100-40gb": "a100", "a100-80gb": "a100", "h100-80gb": "h100", "h100-96gb": "h100"}
"""Chips with sources, by device. The H200 has H100's chip and another memory; its only authors' steps lie outside of
what H100s' say, so it counts as a chip without a source."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Within:
    """Nine of ten published steps take between `low` and `high` times the predicted seconds."""

    low: float
    high: float
    rows: int
    sources: int
    """Sources of whole steps on that chip, and their rows; 0 where there are none."""


@cache
def table() -> dict[str, Within]:
    """The intervals of `within.toml`."""
    return {name: Within(**found) for name, found in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def within(step: Step, on: Hardware) -> Within:
    """The interval of a step on that hardware. No source is known of steps for which the host computes or copies."""
    chip = OTHER if step.copies + step.on_host > 0.01 * step.seconds else CHIPS.get(on.name, OTHER)
    if chip != OTHER and (is_launch_bound(step) or not _in_halves(step)):
        return Within(*WITHIN, 0, 0)
    return table()[chip]


def is_launch_bound(step: Step) -> bool:
    """Whether the host binds the step: kernels and collectives together do not fill it."""
    return sum(span.end - span.begin for span in step.spans) < step.seconds


def _in_halves(step: Step) -> bool:
    """Whether most FLOPs are of products in 16 bits."""
    flops = {True: 0.0, False: 0.0}
    for span in step.spans:
        if span.cost is not None:
            flops[span.cost.dtype in HALVES] += span.cost.flops
    return flops[True] > flops[False]

"""Inside attention: the time of its two matrix products and its softmax in a profiled step's forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from shardmark.meter.kernels import MATRIX_PRODUCT, SOFTMAX, Call, StepProfile, category
from shardmark.rows.columns import Entry
from shardmark.rows.observers.profile import Profile
from shardmark.rows.row import AttentionPart, Kernels
from shardmark.text import layout


class AttentionProfile(Profile):
    """Kernels by phase, and the parts of attention, which a fused kernel does not show.

    `flops` are those of "scores", "softmax" and "values" in the forward of all layers.
    """

    def __init__(self, flops: Mapping[str, int]) -> None:
        super().__init__(partial(_kernels, flops))

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Each row's kernels, and below them the parts of attention."""
        for entry in entries:
            yield from super().lines([entry])
            if parts := entry["extra_info"].get("kernels", {}).get("attention"):
                yield ""
                yield from layout(list(_table(parts)), ("inside attention, forward",))


def _kernels(flops: Mapping[str, int], profile: StepProfile) -> Kernels:
    parts = attention_parts(profile.inside(".attention", "forward"))
    attention: dict[str, AttentionPart] = {
        name: {"seconds": seconds, "flops": flops[name]} for name, seconds in parts.items()
    }
    return {"phases": profile.as_row(), "attention": attention}


def attention_parts(modules: Mapping[str, Iterable[Call]]) -> dict[str, float]:
    """Seconds of attention's "scores" (q kᵀ), "softmax" and "values" (probabilities times v) in forward.

    Eager attention runs two matrix products, the one of the scores first. Empty unless each module ran exactly two.
    """
    parts = dict.fromkeys(("scores", "softmax", "values"), 0.0)
    for calls in modules.values():
        products: dict[float, float] = defaultdict(float)  # by their operator's start: one may launch several kernels
        for call in calls:
            if category(call.operator or call.name) == MATRIX_PRODUCT:
                products[call.start] += call.seconds
            elif call.category == SOFTMAX:
                parts["softmax"] += call.seconds
        if len(products) != 2:
            return {}
        for name, start in zip(("scores", "values"), sorted(products), strict=True):
            parts[name] += products[start]
    return parts if modules else {}


def _table(parts: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    """Softmax beside the two products, in time and in FLOPs."""
    names = {"scores": "scores = q kᵀ", "softmax": "softmax", "values": "probabilities v"}
    rows = {name: parts[key] for key, name in names.items()}
    products = {measure: parts["scores"][measure] + parts["values"][measure] for measure in ("seconds", "flops")}
    rows["both products"] = products
    for name, part in rows.items():
        yield {
            "inside attention, forward": name,
            "total ms": f"{part['seconds'] * 1e3:,.3f}",
            "GFLOP": f"{part['flops'] / 1e9:,.3f}",
            "of the products' time": f"{part['seconds'] / products['seconds']:.1%}" if products["seconds"] else None,
            "of the products' FLOPs": f"{part['flops'] / products['flops']:.1%}",
        }

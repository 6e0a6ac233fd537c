"""Inside attention: what its two products and its softmax take of a profiled step's forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from impl.training_step.accounting import attention_flops
from impl.training_step.cases import TrainingStepCase
from shardmark.meter.kernels import MATRIX_PRODUCT, SOFTMAX, Call, StepProfile, category
from shardmark.rows.observers import Entry, Profile
from shardmark.text import layout


class AttentionProfile(Profile):
    """Kernels by phase, and beside them attention's parts, where they are seen: not in a fused kernel."""

    def __init__(self, case: TrainingStepCase) -> None:
        super().__init__(partial(_kernels, case))

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """The parts stand below each row's kernels."""
        for entry in entries:
            yield from super().lines([entry])
            if parts := entry["extra_info"].get("kernels", {}).get("attention"):
                yield ""
                yield from layout(list(_table(parts)), ("inside attention, forward",))


def _kernels(case: TrainingStepCase, profile: StepProfile) -> dict[str, Any]:
    return {"phases": profile.as_row(), "attention": inside_attention(profile, case)}


def inside_attention(profile: StepProfile, case: TrainingStepCase) -> dict[str, dict[str, float]]:
    """Seconds and FLOPs of attention's parts in all layers' forward."""
    flops = attention_flops(case)
    parts = attention_parts(profile.inside(".attention", "forward"))
    return {name: {"seconds": seconds, "flops": flops[name]} for name, seconds in parts.items()}


def attention_parts(modules: Mapping[str, Iterable[Call]]) -> dict[str, float]:
    """Seconds of attention's "scores" (q kᵀ), "softmax" and "values" (probabilities times v) in forward.

    Attention that is not fused runs two products, the scores' first. Empty unless each module ran just these.
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

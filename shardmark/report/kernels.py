"""The kernels under a question's table: what each phase ran, matrix products against the rest, attention's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from shardmark.kernels import CATEGORIES, MATRIX_PRODUCT

TOP = 5
"""Kernels of a phase that are printed; the row has more."""

WIDEST = 60
"""Characters of a kernel's name: on CUDA some are templates of several hundred."""


def kernel_lines(entries: list[dict[str, Any]], layout: Any) -> Iterator[str]:
    """For each row with kernels: their table by phase, each category's share, and what attention's parts took."""
    for entry in entries:
        row = entry["extra_info"]
        if kernels := row.get("kernels"):
            phases = kernels["phases"]
            yield ""
            yield f"{row['case']['id']}  {row['implementation']}: kernels by phase"
            yield ""
            yield from layout(list(_kernels(phases)), ("phase", "kernel", "category"))
            yield ""
            yield from layout(list(_categories(phases)), ("of",))
            if kernels.get("attention"):
                yield ""
                yield from layout(list(_attention(kernels["attention"])), ("inside attention, forward",))


def _kernels(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    for phase, entry in phases.items():
        for kernel in entry["top"][:TOP]:
            name = kernel["name"]
            yield {
                "phase": phase,
                "share": f"{kernel['share']:.1%}",
                "calls": f"{kernel['calls']:,}",
                "total ms": f"{kernel['seconds'] * 1e3:,.3f}",
                "kernel": name if len(name) <= WIDEST else f"{name[: WIDEST - 3]}...",
                "category": kernel["category"],
            }


def _categories(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    """Each category's share of each phase, and of the phases up to there: before and after the optimizer's."""
    alone = [[phase] for phase in phases]
    for group in [*alone, *list(accumulate(alone))[1:]]:
        total = sum(phases[phase]["seconds"] for phase in group)
        sums = {kind: sum(phases[phase]["categories"][kind] for phase in group) for kind in CATEGORIES}
        yield {
            "of": " + ".join(group),
            "total ms": f"{total * 1e3:,.3f}",
            **{
                f"{kind}s" if kind == MATRIX_PRODUCT else kind: f"{part / total:.1%}" if total else None
                for kind, part in sums.items()
            },
        }


def _attention(parts: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
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

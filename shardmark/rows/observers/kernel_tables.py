"""Lines under a question's table: the kernels of each phase, and each category's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from shardmark.meter.kernels import CATEGORIES, MATRIX_PRODUCT
from shardmark.text import cut, layout

TOP = 5
"""Most kernels of a phase that are printed; the row has more."""

WIDEST = 60
"""Most characters of a kernel's name; some of CUDA's are templates of several hundred."""


def kernel_lines(entry: dict[str, Any]) -> Iterator[str]:
    """Tables of a row that has kernels: kernels by phase, and each category's share."""
    row = entry["extra_info"]
    if kernels := row.get("kernels"):
        phases = kernels["phases"]
        yield ""
        yield f"{row['case']['id']}  {row['implementation']}: kernels by phase"
        yield ""
        yield from layout(list(_kernels(phases)), ("phase", "kernel", "category"))
        yield ""
        yield from layout(list(_categories(phases)), ("of",))


def _kernels(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    for phase, entry in phases.items():
        for kernel in entry["top"][:TOP]:
            yield {
                "phase": phase,
                "share": f"{kernel['share']:.1%}",
                "calls": f"{kernel['calls']:,}",
                "total ms": f"{kernel['seconds'] * 1e3:,.3f}",
                "kernel": cut(kernel["name"], WIDEST),
                "category": kernel["category"],
            }


def _categories(phases: Mapping[str, Any]) -> Iterator[dict[str, str | None]]:
    """Each category's share of each phase, and of the phases so far, as with and without the optimizer."""
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

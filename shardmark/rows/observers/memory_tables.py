"""Lines under a question's table: memory by kind, what forward keeps beside its formula, the largest blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardmark.meter.timeline import KINDS
from shardmark.text import layout, mib

TOP = 5
"""Most blocks that are printed; the row has more."""


def memory_lines(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each row with its bytes by kind: three tables, in MiB."""
    for entry in entries:
        row = entry["extra_info"]
        if kinds := row["memory"].get("kinds"):
            title = f"{row['case']['id']}  {row['implementation']}"
            yield from ("", f"{title}: MiB live by kind", "")
            yield from layout([_phase(phase, nbytes) for phase, nbytes in kinds.items()], ("at",))
            if any(kept["formula"] is not None for kept in row["memory"]["activations"]):
                yield from ("", f"{title}: MiB that forward keeps for backward, all layers together", "")
                yield from layout(list(_kept(row["memory"]["activations"])), ("module", "operator"))
            if largest := row["memory"]["largest"]:
                yield from ("", f"{title}: the largest blocks at the peak", "")
                yield from layout([_block(block) for block in largest[:TOP]], ("kind", "module", "operator"))


def stage_lines(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One table of the bytes held after each stage, with the stages as columns."""
    rows = [entry["extra_info"] for entry in entries if entry["extra_info"]["memory"].get("stages")]
    if rows:
        stages = [row["memory"]["stages"] for row in rows]
        names = list(dict.fromkeys(name for row in sorted(stages, key=len, reverse=True) for name in row))
        lines = (_held(row, figure, names) for row in rows for figure in ("live", "formula", "peak", "reserved"))
        yield from ("", "MiB after each stage", "")
        yield from layout([line for line in lines if line is not None], ("case", "implementation", "MiB"))


def _held(row: dict[str, Any], figure: str, names: list[str]) -> dict[str, str | None] | None:
    """A line for one figure of a row's stages; None without it, as only CUDA reserves bytes."""
    held = {name: stage[figure] for name, stage in row["memory"]["stages"].items() if stage.get(figure) is not None}
    if not held:
        return None
    what = {"case": row["case"]["id"], "implementation": row["implementation"], "MiB": figure}
    return what | {name.replace("_", " "): mib(held[name]) if name in held else None for name in names}


def _phase(phase: str, nbytes: dict[str, int]) -> dict[str, str | None]:
    cells = {kind: mib(nbytes.get(kind, 0)) for kind in KINDS}
    return {"at": phase.replace("_", " "), **cells, "total": mib(sum(nbytes.values()))}


def _kept(activations: list[dict[str, Any]]) -> Iterator[dict[str, str | None]]:
    for kept in activations:
        yield {
            "module": kept["module"] or "outside of modules",
            "operator": kept["operator"] or None,
            "metered": mib(kept["bytes"]),
            "formula": None if kept["formula"] is None else mib(kept["formula"]),
        }
    formulas = [kept["formula"] for kept in activations]
    yield {
        "module": "total",
        "operator": None,
        "metered": mib(sum(kept["bytes"] for kept in activations)),
        "formula": None if None in formulas else mib(sum(formulas)),
    }


def _block(block: dict[str, Any]) -> dict[str, str | None]:
    return {
        "MiB": mib(block["nbytes"]),
        "kind": block["kind"],
        "module": block["module"] or None,
        "operator": block["operator"] or None,
    }

"""Where memory goes: by tensor, by stage, and by sequence length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from shardmark.meter import timeline
from shardmark.meter.measure_case import WARMUPS, warmed_up
from shardmark.meter.memory import release
from shardmark.meter.plan import Measured, Plan
from shardmark.meter.trace import module_ranges, modules_of
from shardmark.rows.columns import Column, Entry
from shardmark.rows.fill import part_of
from shardmark.rows.observers.fits import fit_polynomial
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Block, Row, Stage
from shardmark.rows.row import Memory as MemoryPart
from shardmark.text import layout, mib

TOP = 5
"""Most blocks that are printed; the row has more."""

POINTS = 4
"""Fewest lengths to fit: three coefficients go through any three."""


def _after_init(entry: Entry, row: Row) -> str | None:
    memory = row["memory"]
    observed = "kinds" in memory or "peaks" in memory  # which Timeline and Compile fill
    return mib(memory["phases"]["after_init"]) if observed and "after_init" in memory.get("phases", {}) else None


AFTER_INIT = Column("after init MiB", _after_init, after="before backward MiB")
"""Every metered row has this figure; it is shown where an observer looks at the steps before the steady state."""


class Timeline(Observer):
    """Where memory goes: every byte of one step on the first rank by kind, module and operator.

    `activations` are the expected bytes, by module and operator, that forward keeps for backward. The workload's
    `kinds()` gives its live tensors as "parameters", "gradients" and "optimizer state".
    """

    needs = ("kinds",)
    of_memory = True
    columns: ClassVar[tuple[Column, ...]] = (AFTER_INIT,)

    def __init__(self, activations: Mapping[tuple[str, str], int] | None = None) -> None:
        self.activations = activations or {}

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> timeline.Timeline | None:
        """Record the first rank; the others run the same steps, as these communicate."""
        if plan.world_size == 1 or dist.get_rank() == 0:
            return timeline_pass(plan)
        release(plan.device)
        warmed_up(plan, WARMUPS + 1)
        return None

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's "memory": "kinds" at each phase, the "curve", "activations", and the "largest" blocks."""
        row["memory"] |= timeline_entry(ranks[0].observed[type(self)], self.activations)

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """For each row three tables, in MiB: live by kind, kept for backward beside its formula, the largest blocks."""
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
                    names = ("kind", "module", "operator")
                    blocks = [{"MiB": mib(each["nbytes"]), **{name: each[name] for name in names}} for each in largest]
                    yield from layout(blocks[:TOP], names)


def timeline_pass(plan: Plan) -> timeline.Timeline:
    """Record the kind of each byte of one step, and who allocated it."""
    release(plan.device)
    with timeline.timeline(plan.device) as recording:
        workload = warmed_up(plan)
        workload.prepare()
        with module_ranges(modules_of(workload)):
            recording.mark(timeline.BEFORE, workload.kinds())
            workload.step(lambda part: recording.mark(f"after_{part}", workload.kinds()))
    return recording.read()


def timeline_entry(found: timeline.Timeline, expected: Mapping[tuple[str, str], int]) -> MemoryPart:
    """The observer's part of the row; `expected` is the formula's bytes by module and operator."""
    kept = timeline.by_layer_and_operator(found.activations)
    return {
        "kinds": found.phases,
        "curve": found.curve,
        "activations": [
            {"module": module, "operator": operator, "bytes": kept.get(where, 0), "formula": expected.get(where)}
            for where in {**kept, **expected}
            for module, operator in [where]
        ],
        "largest": [part_of(Block, block) for block in found.largest],
    }


def _phase(phase: str, nbytes: dict[str, int]) -> dict[str, str | None]:
    cells = {kind: mib(nbytes.get(kind, 0)) for kind in timeline.KINDS}
    return {"at": phase.replace("_", " "), **cells, "total": mib(sum(nbytes.values()))}


def _kept(activations: list[dict[str, Any]]) -> Iterator[dict[str, str | None]]:
    for kept in activations:
        yield {
            "module": kept["module"] or "outside of modules",
            "operator": kept["operator"],
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


class Stages(Observer):
    """Memory after each stage of making the workload, as the workload reports stages (`shardmark.api.stage`).

    `formulas` are the bytes that should be live after each.
    """

    of_memory = True

    def __init__(self, formulas: Mapping[str, int]) -> None:
        self.formulas = formulas

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """In the row's "memory": "stages", each on the rank that holds most then."""
        if not ranks[0].memory.stages:
            raise TypeError(f"Stages: {row['implementation']} was made without a call of shardmark.api.stage")
        row["memory"]["stages"] = {
            name: {
                **part_of(Stage, max((rank.memory.stages[name] for rank in ranks), key=lambda stage: stage.live)),
                "formula": self.formulas.get(name),
            }
            for name in ranks[0].memory.stages
        }

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """One table with a column for each stage."""
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


class PeakByLength(Observer):
    """The growth of the peak with the sequence, for cases that have a `seq`: a fit under the table, nothing in the
    row."""

    of_memory = True

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """A line for each implementation and kind of case that was metered at enough lengths."""
        groups: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for entry in entries:
            row = entry["extra_info"]
            case = row["case"]
            if "seq" in case and "tensors" in row["memory"]:
                kind = case["id"].replace(f"-s{case['seq']}-", "-")
                groups[kind, row["implementation"]][case["seq"]] = row["memory"]["tensors"]
        fitted = {group: fit_polynomial(peaks, degree=2) for group, peaks in groups.items() if len(peaks) >= POINTS}
        if fitted:
            yield ""
            width = max(len(f"{kind}  {implementation}") for kind, implementation in fitted)
        for (kind, implementation), ((quadratic, linear, constant), miss) in fitted.items():
            label = f"{kind}  {implementation}".ljust(width)
            formula = f"{round(quadratic, 2) + 0.0:,.2f} seq² {round(linear):+,} seq {round(constant):+,}"  # no "-0"
            yield f"{label}  tensors at the peak = {formula} bytes (misses by {miss:.1%} at most)"

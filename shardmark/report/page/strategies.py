"""Which strategies fit on the hardware that was predicted for, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.report.ranking import who
from shardmark.rows.columns import Entry
from shardmark.rows.row import figure
from shardmark.text import mib, ms

COLUMNS = ("strategy", "ranks", "step ms", "tensors MiB", "reserved MiB", "free MiB", "fits")


@dataclass(frozen=True)
class Fits:
    """Of one case, and of which hardware."""

    title: str
    rows: list[list[str]]
    """What fits, the fastest first; then what does not."""


def strategies(entries: Sequence[Entry]) -> list[Fits]:
    """A table for each case that several implementations were predicted for, where it is known what a device has."""
    cases: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if figure(entry, "memory.available") is not None and figure(entry, "memory.reserved") is not None:
            row = entry["extra_info"]
            cases.setdefault((row["case"]["id"], row["world_size"]), []).append(entry)
    found = []
    for (case, ranks), same in cases.items():
        if len({who(entry["extra_info"]) for entry in same}) > 1:
            title = f"{case} on {ranks} x {same[0]['extra_info']['hardware']}"
            found.append(Fits(title, [_cells(entry) for entry in sorted(same, key=_place)]))
    return found


def _free(entry: Entry) -> int:
    free: int = figure(entry, "memory.available") - figure(entry, "memory.reserved")
    return free


def _place(entry: Entry) -> tuple[bool, bool, float]:
    seconds = figure(entry, "stats.mean") if entry["stats"] else None
    return _free(entry) < 0, seconds is None, seconds or 0.0


def _cells(entry: Entry) -> list[str]:
    row, free = entry["extra_info"], _free(entry)
    return [
        "=".join(who(row)),
        str(row["world_size"]),
        ms(entry["stats"]["mean"]) if entry["stats"] else "",
        mib(row["memory"]["tensors"]),
        mib(row["memory"]["reserved"]),
        mib(free),
        "no" if free < 0 else "yes",
    ]

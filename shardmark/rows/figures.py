"""Figures of a row's entry by their places, "stats.median" or "time.ratio"; the main ones are in --junitxml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAIN_FIGURES = (
    "stats.median",
    "family",
    "implementation",
    "case.id",
    "world_size",
    "verdict",
    "time.peer",
    "time.ratio",
    "memory.tensors",
    "memory.peak",
    "memory.budget",
)
"""Their places in an entry, as `figure` takes them."""


def main_figures(entry: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(place, value) of each main figure that the entry has, for the test's properties in --junitxml."""
    return [(where, found) for where in MAIN_FIGURES if (found := figure(entry, where)) is not None]


def figure(entry: Mapping[str, Any], where: str) -> Any:
    """The value at a place in the entry's stats ("stats.median") or its row ("time.ratio"); None if there is none."""
    found: Any = entry if where.startswith("stats.") else entry["extra_info"]
    for name in where.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found

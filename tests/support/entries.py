"""Entries of made-up figures, as a run's tests make them."""

from dataclasses import dataclass
from typing import Any

from shardmark.meter.plan import Identity
from shardmark.report.ranking import MEDIAN_ERROR
from shardmark.rows.columns import Entry
from shardmark.rows.fill import new_row

QUESTION = "What does a nap cost?"


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name


def timed(seconds: float, error: float = 0.0, rounds: int = 9) -> dict[str, float]:
    """pytest-benchmark's statistics of these rounds, whose median has that standard error."""
    half = error * rounds**0.5 / MEDIAN_ERROR / 2
    return {"median": seconds, "q1": seconds - half, "q3": seconds + half, "mean": seconds, "rounds": rounds}


def entry(
    implementation: str,
    seconds: float | None = 1.0,
    race: tuple[str, float, float, float] | None = None,
    *,
    tensors: int | None = None,
    case: str = "short",
    family: str = "naps",
    ranks: int = 1,
    verdict: str | None = "pass",
    error: float = 0.0,
    **sections: dict[str, Any],
) -> Entry:
    """An entry of a step that takes `seconds`, with standard error `error`. `race` is (peer, low, ratio, high): the
    ratio to the peer between the ends of its interval."""
    row = new_row(Identity(family, implementation, Case(case), "cpu", ranks), "smoke", None)
    if race is not None:
        peer, low, ratio, high = race
        row["time"] |= {"peer": peer, "ratio": ratio, "interval": [low, high] if high else None}
    if tensors is not None:
        row["memory"] |= {"tensors": tensors, "peak": tensors}
    for name, more in sections.items():
        row[name] |= more
    row["verdict"] = verdict
    return {
        "group": QUESTION,
        "name": f"test_nap[{implementation}-{case}]",
        "fullname": f"test_naps.py::test_nap[{implementation}-{case}-{ranks}]",
        "stats": None if seconds is None else timed(seconds, error),
        "extra_info": row,
    }

"""What an earlier run measured (`--against old.json`), and what is slower or larger since.

Bytes and counters carry no noise: any more is worse. Steps are compared by their ratio to the peer of the same run, as
seconds depend on what else the machine does; and on one machine alone, as another one gives another ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardmark.rows.atomic_json import Entry
from shardmark.rows.reader import LISTS, RunFileError, lacks_schema, read_json
from shardmark.rows.row import Row, Time
from shardmark.verdict.betting import FAIL, PASS, Interval
from shardmark.verdict.budget import tolerated

WORKSPACE_SLACK = 1.05
"""Workspace may be this many times what it was: a library chooses among its kernels anew in each run."""

OF_LIBRARIES = ("operators", "kernels", "saved_bytes", "synchronizations")
"""Counters that depend on what PyTorch chooses, which is compared with the same one on the same processor and GPUs."""

Collectives = list[list[Any]]
"""Operation, dtype, bytes of one, and how many of them in a row."""


@dataclass(frozen=True)
class Machine:
    """All that a ratio to a peer depends on beside the code, by the names that `machine_info` has for it."""

    device: str
    gpus: str
    processor: str
    cores: int
    threads: int
    scheduling: str
    torch: str

    @classmethod
    def of(cls, info: Entry) -> Machine:
        """Raises KeyError where it does not say."""
        processor = str(info["cpu"].get("brand_raw"))
        gpus = ", ".join(map(str, info["gpus"]))
        scheduling = str(info.get("scheduling", ""))
        return cls(str(info["device"]), gpus, processor, info["cores"], info["threads"], scheduling, str(info["torch"]))

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown |= {name: f"{shown[name]} {name}" for name in ("cores", "threads")} | {"torch": f"torch {self.torch}"}
        return ", ".join(filter(None, shown.values()))


@dataclass(frozen=True)
class OldRace:
    """A ratio to a peer, and the interval that its verdict was taken from; None where the rounds were too few."""

    peer: str
    ratio: float
    ends: tuple[float, float] | None

    @classmethod
    def of(cls, time: Time) -> OldRace | None:
        """None of a row without a peer, and of a prediction, which no interval was taken for."""
        if time.get("peer") is None or "predicted" in time:
            return None
        ends: tuple[float, float] | None = None
        if time["judged_interval"] is not None:
            low, high = map(_number, time["judged_interval"])
            ends = (low, high)
        return cls(str(time["peer"]), _number(time["ratio"]), ends)


@dataclass(frozen=True)
class OldRow:
    """What of an earlier run's row is compared."""

    device: str
    world_size: int
    link: str | None
    race: OldRace | None
    memory: dict[str, int]
    counters: dict[str, float]
    collectives: Collectives | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> OldRow:
        if schema := lacks_schema(row):
            raise ValueError(f"no row of {schema}")
        memory = {name: int(_number(row["memory"][name])) for name in ("tensors", "workspace") if name in row["memory"]}
        counters = {name: value for name, value in row.get("counters", {}).items() if value is not None}
        collectives = counters.pop("collectives", None)
        if collectives is not None:
            collectives = [[str(a), str(dtype), _number(n), _number(times)] for a, dtype, n, times in collectives]
        counters = {name: _number(value) for name, value in counters.items()}
        race = OldRace.of(row["time"])
        return cls(row["device"], row["world_size"], row["link"], race, memory, counters, collectives)


class Baseline:
    """The file of an earlier run: its rows by the full names of their tests, and its machine.

    Raises RunFileError for a file that is not there, no whole JSON, or not of this suite as it is now.
    """

    def __init__(self, path: Path) -> None:
        self.output = output = read_json(path, f"--against {path}")
        try:
            entries = [entry for entry in output["benchmarks"] if "family" in entry["extra_info"]]
        except (KeyError, TypeError):
            entries = []  # somebody else's
        if not entries:
            raise RunFileError(f"--against {path} has no rows that a run of this suite wrote with --benchmark-json")
        try:
            self.machine = Machine.of(output["machine_info"])
            self.rows = {entry["fullname"]: OldRow.of(entry["extra_info"]) for entry in entries}
            self.questions = {question["text"]: question for question in output.get("questions", [])}
            self.entries = {each: {entry["fullname"]: entry for entry in output[each]} for each in LISTS}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFileError(
                f"--against {path} is of another version of this suite ({type(error).__name__}: {error}): "
                "remove it, and have --update-baseline write a new one"
            ) from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TypeError(f"{value!r} is no number that was measured")
    return value


@dataclass(frozen=True)
class Change:
    """One figure beside its older one: FAIL where it is worse, and what to say of it."""

    verdict: str
    text: str
    better: bool = False


Compared = list[Change] | str
"""The changes of what was compared, or in some words of which rows it was not."""


def compared(old: OldRow, row: Row, ratio: Interval | None, same_machine: bool, name: str) -> dict[str, Compared]:
    """A row's time, memory and counters beside those of the file of that name.

    `ratio` is the interval of the ratio to its peer that verdicts are taken from.
    """
    if (old.device, old.world_size) != (row["device"], row["world_size"]):
        return dict.fromkeys(("time", "memory", "counters"), "on another device or number of ranks")
    return {
        "time": _time(old, row, ratio, name) if same_machine else "on another machine",
        "memory": _memory(old, row["memory"], same_machine, name),
        "counters": _counters(old, row.get("counters", {}), same_machine, name),
    }


def _time(old: OldRow, row: Row, ratio: Interval | None, name: str) -> Compared:
    before = old.race
    if ratio is None or before is None:
        return "without a peer"
    if before.peer != row["time"]["peer"]:
        return "with another peer"
    if old.link != row["link"]:
        return "on another link"
    if before.ends is None:
        return f"of too few rounds in {name}"
    low, high = before.ends
    text = (
        f"{ratio.center:.3f}x {before.peer}'s time, {ratio}, against {before.ratio:.3f}x in {name}, "
        f"[{low:.4g}, {high:.4g}]"
    )
    return [Change(ratio.verdict(tolerated(high)), text, better=tolerated(ratio.high) < low)]


def _memory(old: OldRow, memory: Mapping[str, Any], same_machine: bool, name: str) -> Compared:
    parts = {"tensors": 1.0, "workspace": WORKSPACE_SLACK} if same_machine else {"tensors": 1.0}
    changes = [
        _larger_is_worse(f"bytes of {part} at the peak", memory[part], old.memory[part], name, slack)
        for part, slack in parts.items()
        if part in memory and part in old.memory
    ]
    return changes or "not metered"


def _counters(old: OldRow, counters: Mapping[str, Any], same_machine: bool, name: str) -> Compared:
    changes = [
        _larger_is_worse(counter.replace("_", " "), counters[counter], before, name)
        for counter, before in old.counters.items()
        if counters.get(counter) is not None and (same_machine or counter not in OF_LIBRARIES)
    ]
    if old.collectives is not None and counters.get("collectives") is not None:
        changes += _collectives(old.collectives, counters["collectives"], name)
    return changes or "not counted"


def _larger_is_worse(what: str, now: float, before: float, name: str, slack: float = 1.0) -> Change:
    text = f"{now:,} {what}, {before:,} in {name}"
    return Change(FAIL if now > before * slack else PASS, text, better=now * slack < before)


def _collectives(before: Collectives, now: Collectives, name: str) -> list[Change]:
    """Their number and their bytes; where both are the same, also which ones, and in which order."""
    before, now = _runs(before), _runs(now)
    if now == before:
        return [Change(PASS, "")]
    counts = [sum(times for *_, times in runs) for runs in (now, before)]
    sizes = [sum(nbytes * times for *_, nbytes, times in runs) for runs in (now, before)]
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, before, strict=False)))
    first = f"the first that differs is {_shown(now[place:])}, {_shown(before[place:])} in {name}"
    changes = [
        _larger_is_worse("collectives", counts[0], counts[1], name),
        _larger_is_worse("bytes in collectives", sizes[0], sizes[1], name),
    ]
    if (counts[0], sizes[0]) == (counts[1], sizes[1]):
        return [Change(FAIL, f"other collectives, as many and as large: {first}")]
    return [replace(change, text=f"{change.text}, and {first}") for change in changes]


def _runs(collectives: Collectives) -> Collectives:
    """With those that are alike, one after another, as one."""
    runs: Collectives = []
    for *collective, times in collectives:
        if runs and runs[-1][:-1] == collective:
            runs[-1][-1] += times
        else:
            runs.append([*collective, times])
    return runs


def _shown(runs: Collectives) -> str:
    if not runs:
        return "none"
    operation, dtype, nbytes, times = runs[0]
    return f"{times} x {operation} of {nbytes:,} bytes of {dtype}"

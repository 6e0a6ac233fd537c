"""The baseline of a comparison: the rows of an earlier run, and the machine that it ran on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardmark.meter.disturbances import WAITED
from shardmark.rows.atomic_json import Entry
from shardmark.rows.pairs import number, pairs_of
from shardmark.rows.reader import LISTS, RunFileError, lacks_schema, read_json
from shardmark.verdict.slowdown import Paired

Collectives = list[list[Any]]
"""[operation, dtype, bytes of one, times in a row] of each collective."""


@dataclass(frozen=True)
class Machine:
    """Everything beside the code that a ratio to a peer depends on, by its name in `machine_info`."""

    device: str
    gpus: str
    processor: str
    cores: int
    threads: int
    scheduling: str
    torch: str

    @classmethod
    def of(cls, info: Entry) -> Machine:
        """Read a file's `machine_info`; raises KeyError where a name is missing."""
        processor = str(info["cpu"].get("brand_raw"))
        gpus = ", ".join(map(str, info["gpus"]))
        scheduling = str(info.get("scheduling", ""))
        return cls(str(info["device"]), gpus, processor, info["cores"], info["threads"], scheduling, str(info["torch"]))

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown |= {name: f"{shown[name]} {name}" for name in ("cores", "threads")} | {"torch": f"torch {self.torch}"}
        return ", ".join(filter(None, shown.values()))


@dataclass(frozen=True)
class BaselineRow:
    """The parts of an earlier row that a comparison reads."""

    device: str
    world_size: int
    link: str | None
    peer: str | None
    pairs: dict[str, Paired]
    """The step paired with its "peer" and with the calibration "load"."""
    waited: bool
    """Whether its threads waited for a core, which other processes had."""
    memory: dict[str, int]
    """Bytes at the peak, of "tensors" and "workspace"."""
    counters: dict[str, float]
    collectives: Collectives | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> BaselineRow:
        """Read a row; raises KeyError, TypeError or ValueError where another version wrote it."""
        if schema := lacks_schema(row):
            raise ValueError(f"no row of {schema}")
        memory = {name: int(number(row["memory"][name])) for name in ("tensors", "workspace") if name in row["memory"]}
        counters = {name: value for name, value in row.get("counters", {}).items() if value is not None}
        collectives = counters.pop("collectives", None)
        if collectives is not None:
            collectives = [[str(a), str(dtype), number(n), number(times)] for a, dtype, n, times in collectives]
        counters = {name: number(value) for name, value in counters.items()}
        pairs = {name: pairs for name, (pairs, _) in pairs_of(row["time"]).items()}
        peer = str(row["time"]["peer"]) if "peer" in pairs else None
        waited = WAITED in row["time"].get("machine", {})
        return cls(row["device"], row["world_size"], row["link"], peer, pairs, waited, memory, counters, collectives)


class Baseline:
    """The file of an earlier run: its rows by the full names of their tests, and its machine.

    Raises RunFileError for a file that is missing, is not whole JSON, or was not written by this version of the suite.
    """

    def __init__(self, path: Path) -> None:
        self.output = output = read_json(path, f"--against {path}")
        try:
            entries = [entry for entry in output["benchmarks"] if "family" in entry["extra_info"]]
        except (KeyError, TypeError):
            entries = []  # another program's file
        if not entries:
            raise RunFileError(f"--against {path} has no rows that a run of this suite wrote with --benchmark-json")
        try:
            self.machine = Machine.of(output["machine_info"])
            self.rows = {entry["fullname"]: BaselineRow.of(entry["extra_info"]) for entry in entries}
            self.questions = {question["text"]: question for question in output.get("questions", [])}
            self.entries = {each: {entry["fullname"]: entry for entry in output[each]} for each in LISTS}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFileError(
                f"--against {path} is of another version of this suite ({type(error).__name__}: {error}): "
                "remove it, and have --update-baseline write a new one"
            ) from None

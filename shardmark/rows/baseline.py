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


IN_WORDS = {
    "gpus": ("{}", "no GPU"),
    "generation": ("{}", "a processor of unknown model"),
    "processor": ("{}", "a processor without a name"),
    "instruction_sets": ("with {}", "without these instruction sets"),
    "cores": ("{} cores", ""),
    "threads": ("{} threads", ""),
    "scheduling": ("{}", "Linux's default scheduling"),
    "torch": ("torch {}", ""),
    "python": ("Python {}", "an unknown Python"),
}
"""Parts of a machine in words, and what is said where a part is empty."""

INSTRUCTION_SETS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "neon", "sme", "sse", "sve", "vnni")
"""Beginnings of the processor's flags by which libraries choose kernels. Other flags change with Linux's version."""


@dataclass(frozen=True)
class Machine:
    """Everything beside the code that a ratio to a peer depends on, read from a file's `machine_info`.

    A part that the file does not have is empty: it equals only a part that the other file does not have either.
    """

    device: str
    gpus: str
    processor: str
    generation: str
    """Family, model and stepping, or on Arm the numbers of the part: one brand has several generations."""
    instruction_sets: str
    cores: int
    threads: int
    scheduling: str
    torch: str
    python: str
    """Python's minor version, on which bytecodes depend."""

    @classmethod
    def of(cls, info: Entry) -> Machine:
        """Read a file's `machine_info`; raises KeyError where a name is missing."""
        cpu = info["cpu"]
        numbers = [f"{name} {cpu[name]}" for name in ("family", "model", "stepping") if cpu.get(name) is not None]
        part = [f"part {info['cpu_part']}"] if info.get("cpu_part") else []
        return cls(
            device=str(info["device"]),
            gpus=", ".join(map(str, info["gpus"])),
            processor=str(cpu.get("brand_raw", "")),
            generation=" ".join([*numbers, *part]),
            instruction_sets=" ".join(sorted(f for f in cpu.get("flags", ()) if f.startswith(INSTRUCTION_SETS))),
            cores=info["cores"],
            threads=info["threads"],
            scheduling=str(info.get("scheduling", "")),
            torch=str(info["torch"]),
            python=".".join(str(info.get("python_version", "")).split(".")[:2]),
        )

    def __str__(self) -> str:
        said = [field.name for field in fields(self) if field.name != "instruction_sets" and getattr(self, field.name)]
        return ", ".join(map(self._shown, said))

    def beside(self, other: Machine) -> str:
        """The parts in which the two differ, as this one has them."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        return ", ".join(self._shown(name, getattr(other, name)) for name in names)

    def _shown(self, name: str, other: Any = "") -> str:
        """A part in words; of instruction sets those that the other has not."""
        value = getattr(self, name)
        if name == "instruction_sets":
            value = " ".join(sorted({*value.split()} - {*other.split()}))
        said, unsaid = IN_WORDS.get(name, ("{}", ""))
        return said.format(value) if value else unsaid


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
    parts: dict[str, dict[str, int]]
    """Counters by name: "operators_by_name" and "bytecodes_by_function", where the row has them."""
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
        parts = {name: counters.pop(name) for name in list(counters) if isinstance(counters[name], dict)}
        parts = {name: {key: int(number(n)) for key, n in part.items()} for name, part in parts.items()}
        counters = {name: number(value) for name, value in counters.items()}
        device, ranks, link, time = row["device"], row["world_size"], row["link"], row["time"]
        pairs = pairs_of(time)
        peer = str(time["peer"]) if "peer" in pairs else None
        waited = WAITED in time.get("machine", {})
        return cls(device, ranks, link, peer, pairs, waited, memory, counters, parts, collectives)


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

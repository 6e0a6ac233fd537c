"""Columns of tables, with those of the fields that any row may have. Cells are in MiB and ms, rows in bytes and
seconds.

    @pytest.mark.question("What does a nap cost?", columns=["case", "implementation", "time ms", "verdict"])

A question's own column is a `Column` in place of a name. An observer brings the columns of the fields that it fills,
its `columns` (`shardmark.rows.observers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardmark.rows.row import Row
from shardmark.text import cut, mib, ms

OPERATOR_WIDTH = 24
"""Most characters of an operator's name; the row has the whole name."""

Entry = dict[str, Any]

Cell = Callable[[Entry, Row], str | None]


@dataclass(frozen=True)
class Column:
    """A column: its name, and `cell`, the text for an entry of pytest-benchmark and its row, or None for no text."""

    name: str
    cell: Cell
    brief: Cell | None = None
    """The cell in fewer characters, for a table that is too wide."""
    left: bool = False
    """Whether it is aligned to the left."""
    trivial: str | None = None
    """The column is left out where all cells are empty or have this text."""
    after: str | None = None
    """For an observer's column: the column that it follows; None puts it last."""


def _step(entry: Entry, row: Row) -> str | None:
    stats = entry["stats"]
    if "predicted" in row["time"]:
        return _median_step(entry, row)
    return None if stats is None else f"{ms(stats['median'])} [{ms(stats['q1'])}, {ms(stats['q3'])}]"


def _median_step(entry: Entry, row: Row) -> str | None:
    return None if entry["stats"] is None else ms(entry["stats"]["median"])


def _part(part: str) -> Cell:
    def cell(entry: Entry, row: Row) -> str | None:
        parts = row["time"].get("parts", {})
        return ms(parts[part]) if part in parts and len(parts) > 1 else None

    return cell


def _ratio(entry: Entry, row: Row) -> str | None:
    time = row["time"]
    if time.get("ratio") is None:
        return None
    ends = " [{:.3g}, {:.3g}]".format(*time["interval"]) if time["interval"] else ""
    return f"{time['ratio']:.3g}{ends} {time['peer']}"


def _brief_ratio(entry: Entry, row: Row) -> str | None:
    time = row["time"]
    return None if time.get("ratio") is None else f"{time['ratio']:.3g} {time['peer']}"


def goal_outcomes(row: Row) -> Iterator[tuple[str, str]]:
    """(goal as text, outcome) of each goal of the row."""
    time = row["time"]
    if time.get("goal") is not None:
        yield f"{time['goal']:.3g}", str(time["outcome"])
    for name, goal in row["limit"].get("goals", {}).items():
        yield f"{name} {goal['goal']:.0%}", goal["outcome"]


def _goal(entry: Entry, row: Row) -> str | None:
    return ", ".join(f"{goal} {outcome}" for goal, outcome in goal_outcomes(row)) or None


def _fastest_and_slowest(entry: Entry, row: Row) -> str | None:
    ranks = row["time"].get("median_by_rank", [])
    return f"{ms(min(ranks))} / {ms(max(ranks))}" if len(ranks) > 1 else None


Rate = Literal["algorithm_bandwidth", "bus_bandwidth", "flops_per_second", "bytes_per_second"]
Counter = Literal["flops", "operators", "kernels", "synchronizations", "saved_bytes", "bytecodes", "instructions"]


def _rate(name: Rate, unit: float) -> Cell:
    return lambda entry, row: f"{row['work'][name] / unit:.3f}" if name in row["work"] else None


def _to_send(entry: Entry, row: Row) -> str | None:
    return mib(nbytes) if (nbytes := row["work"].get("bytes_communicated")) else None


def _sent(entry: Entry, row: Row) -> str | None:
    work = row["work"]
    return f"{mib(work['bytes_sent'])} / {mib(work['bytes_communicated'])}" if "bytes_sent" in work else None


def _before_backward(entry: Entry, row: Row) -> str | None:
    phases = row["memory"].get("phases", {})
    return mib(phases["after_forward"]) if {"after_forward", "after_backward"} <= set(phases) else None


def _tensors(entry: Entry, row: Row) -> str | None:
    memory = row["memory"]
    if "needed" in memory:
        return f"needs {mib(memory['needed'])} of {mib(memory['available'])}"
    return mib(memory["tensors"]) if "tensors" in memory else None


def _workspace(entry: Entry, row: Row) -> str | None:
    """MiB, and the operator that took it; None where it rounds to 0.00, as where an operator converts one number."""
    memory = row["memory"]
    if mib(memory.get("workspace", 0)) == mib(0):
        return None
    operator = (memory["workspace_operator"] or "").rpartition("::")[2]
    return f"{mib(memory['workspace'])} {cut(operator, OPERATOR_WIDTH)}"


def _bytes(name: Literal["peak", "budget"]) -> Cell:
    return lambda entry, row: mib(row["memory"][name]) if name in row["memory"] else None


def _counter(name: Counter, shown: Callable[[int], str] = "{:,}".format) -> Cell:
    return lambda entry, row: None if (count := row["counters"].get(name)) is None else shown(count)


_ALL = [
    Column("case", lambda entry, row: row["case"]["id"], left=True),
    Column("implementation", lambda entry, row: row["implementation"], left=True),
    Column("ranks", lambda entry, row: str(row["world_size"]), trivial="1"),
    Column("time ms", _step, _median_step),
    Column("host ms", lambda entry, row: ms(host) if (host := row["time"].get("host")) else None),
    Column("forward", _part("forward")),
    Column("backward", _part("backward")),
    Column("exposed comm.", _part("communication")),
    Column("optimizer", _part("optimizer")),
    Column("rank min / max", _fastest_and_slowest),
    Column("to send MiB", _to_send),
    Column("algbw GB/s", _rate("algorithm_bandwidth", 1e9)),
    Column("busbw GB/s", _rate("bus_bandwidth", 1e9)),
    Column("sent / least MiB", _sent),
    Column("TFLOP/s", _rate("flops_per_second", 1e12)),
    Column("GB/s", _rate("bytes_per_second", 1e9)),
    Column("tokens/s", lambda entry, row: f"{r:,.0f}" if (r := row["work"].get("tokens_per_second")) else None),
    Column("MFU", lambda entry, row: f"{row['limit']['mfu']:.1%}" if "mfu" in row["limit"] else None),
    Column("ratio to peer", _ratio, _brief_ratio, left=True),
    Column("goal", _goal, left=True),
    Column("of roofline", lambda entry, row: f"{f:.0%}" if (f := row["limit"].get("fraction")) else None),
    Column("GFLOP", _counter("flops", lambda flops: f"{flops / 1e9:,.2f}")),
    Column("operators", _counter("operators")),
    Column("kernels", _counter("kernels")),
    Column("syncs", _counter("synchronizations"), trivial="0"),
    Column("bytecodes", _counter("bytecodes")),
    Column("instructions", _counter("instructions")),
    Column("saved MiB", _counter("saved_bytes", mib)),
    Column("before backward MiB", _before_backward),
    Column("tensors MiB", _tensors),
    Column("workspace MiB", _workspace, left=True),
    Column("peak MiB", _bytes("peak")),
    Column("budget MiB", _bytes("budget")),
    Column("verdict", lambda entry, row: row["verdict"], left=True),
]

COLUMNS = {column.name: column for column in _ALL}
"""By name, in the order in which `-v` shows them; a column appears where some row of the question fills it."""

DEFAULT = ("case", "implementation", "time ms", "ratio to peer", "tensors MiB", "budget MiB", "verdict")


def among(columns: Iterable[Column], observers: Iterable[Column]) -> list[Column]:
    """`columns`, each followed by the observers' columns that name it as `after`; the other observers' columns last."""
    columns, observers = list(columns), list(dict.fromkeys(observers))
    behind: dict[str, list[Column]] = {column.name: [] for column in columns}
    last = [own for own in observers if own.after not in behind]
    for own in observers:
        if own.after in behind:
            behind[own.after].append(own)
    return [each for column in columns for each in (column, *behind[column.name])] + last

"""The terminal tables: one per question, in the form people publish. MiB and ms here; bytes and seconds in the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from shardmark.budget import MISSED, REACHED, UNDECIDED
from shardmark.report.buckets import bucket_lines
from shardmark.report.fits import peaks_by_length
from shardmark.report.kernels import kernel_lines
from shardmark.report.memory import memory_lines, mib, stage_lines

WIDEST = 24
"""Characters of an operator's name; the row has all of it."""

Entry = dict[str, Any]
Cell = Callable[[Entry, dict[str, Any]], str | None]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def _step(entry: Entry, row: dict[str, Any]) -> str | None:
    stats = entry["stats"]
    return None if stats is None else f"{_ms(stats['mean'])} ± {_ms(stats['stddev'])}"


def _part(part: str) -> Cell:
    def cell(entry: Entry, row: dict[str, Any]) -> str | None:
        parts = row["time"].get("parts", {})
        return _ms(parts[part]) if part in parts and len(parts) > 1 else None

    return cell


def _ratio(entry: Entry, row: dict[str, Any]) -> str | None:
    time = row["time"]
    if time.get("ratio") is None:
        return None
    low, high = time["interval"]
    return f"{time['ratio']:.3g} [{low:.3g}, {high:.3g}] {time['peer']}"


def _goal_outcomes(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each goal of the row as people write it, and whether it was reached."""
    time = row["time"]
    if time.get("goal") is not None:
        yield f"{time['goal']:.3g}", time["outcome"]
    for name, goal in row["limit"].get("goals", {}).items():
        yield f"{name} {goal['goal']:.0%}", goal["outcome"]


def _goal(entry: Entry, row: dict[str, Any]) -> str | None:
    return ", ".join(f"{goal} {outcome}" for goal, outcome in _goal_outcomes(row)) or None


def goals_line(entries: list[Entry]) -> str | None:
    """How many goals of a run were reached, missed and left undecided."""
    counts = Counter(outcome for entry in entries for _, outcome in _goal_outcomes(entry["extra_info"]))
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (REACHED, MISSED, UNDECIDED) if counts[outcome])
    return f"goals: {told}" if told else None


def _fastest_and_slowest(entry: Entry, row: dict[str, Any]) -> str | None:
    ranks = row["time"].get("mean_by_rank", [])
    return f"{_ms(min(ranks))} / {_ms(max(ranks))}" if len(ranks) > 1 else None


def _alone(name: str) -> Cell:
    return lambda entry, row: _ms(row["time"][name]) if name in row["time"] else None


def _hidden(entry: Entry, row: dict[str, Any]) -> str | None:
    return f"{row['time']['hidden']:.0%}" if "hidden" in row["time"] else None


def _rate(name: str, unit: float) -> Cell:
    return lambda entry, row: f"{row['work'][name] / unit:.3f}" if name in row["work"] else None


def _to_send(entry: Entry, row: dict[str, Any]) -> str | None:
    return mib(nbytes) if (nbytes := row["work"].get("bytes_communicated")) else None


def _after_warmups(count: int) -> Cell:
    def cell(entry: Entry, row: dict[str, Any]) -> str | None:
        after = row["time"].get("after_warmups", {}).get(str(count))
        return f"{_ms(after['mean'])} ± {_ms(after['stddev'])}" if after else None

    return cell


def _sent(entry: Entry, row: dict[str, Any]) -> str | None:
    work = row["work"]
    return f"{mib(work['bytes_sent'])} / {mib(work['bytes_communicated'])}" if "bytes_sent" in work else None


def _efficiency(entry: Entry, row: dict[str, Any]) -> str | None:
    work = row["work"]
    return f"{work['efficiency']:.0%} of {work['efficiency_ceiling']:.0%}" if "efficiency" in work else None


def _recomputed(entry: Entry, row: dict[str, Any]) -> str | None:
    return f"{row['work']['recomputed']:.0%}" if "recomputed" in row["work"] else None


def _before_backward(entry: Entry, row: dict[str, Any]) -> str | None:
    phases = row["memory"].get("phases", {})
    return mib(phases["after_forward"]) if {"after_forward", "after_backward"} <= set(phases) else None


def _tensors(entry: Entry, row: dict[str, Any]) -> str | None:
    memory = row["memory"]
    if "needed" in memory:
        return f"needs {mib(memory['needed'])} of {mib(memory['available'])}"
    return mib(memory["tensors"]) if "tensors" in memory else None


def _workspace(entry: Entry, row: dict[str, Any]) -> str | None:
    """With the operator that took it; less than shows, such as a converted number, is none."""
    memory = row["memory"]
    if mib(memory.get("workspace", 0)) == mib(0):
        return None
    operator = memory["workspace_operator"].rpartition("::")[2]
    return f"{mib(memory['workspace'])} {operator if len(operator) <= WIDEST else operator[: WIDEST - 3] + '...'}"


FIRST_STEPS = {
    "after init": ("phases", "after_init"),
    "before step 0": ("phases", "before_first_step"),
    "first peak": ("peaks", "first"),
    "second peak": ("peaks", "second"),
}
"""What is told of the steps before the one that budgets judge, by where it stands in a row's memory."""


def _first_steps(*where: str) -> Cell:
    def cell(entry: Entry, row: dict[str, Any]) -> str | None:
        section, name = where
        told = {"peaks", "kinds"} & set(row["memory"]) and name in row["memory"].get(section, {})
        return mib(row["memory"][section][name]) if told else None

    return cell


COLUMNS: list[tuple[str, Cell]] = [
    ("case", lambda entry, row: row["case"]["id"]),
    ("implementation", lambda entry, row: row["implementation"]),
    ("ranks", lambda entry, row: str(row["world_size"])),
    ("time ms", _step),
    ("one rank ms", lambda entry, row: _ms(s) if (s := row["work"].get("one_rank_seconds")) else None),
    ("efficiency", _efficiency),
    *((f"after {n} warm-up{'s' * (n != 1)}", _after_warmups(n)) for n in (0, 1, 2, 5)),
    ("forward", _part("forward")),
    ("backward", _part("backward")),
    ("exposed comm.", _part("communication")),
    ("optimizer", _part("optimizer")),
    ("compute alone", _alone("compute_alone")),
    ("comm. alone", _alone("communication_alone")),
    ("hidden", _hidden),
    ("rank min / max", _fastest_and_slowest),
    ("to send MiB", _to_send),
    ("alg GB/s", _rate("algorithm_bandwidth", 1e9)),
    ("bus GB/s", _rate("bus_bandwidth", 1e9)),
    ("sent / least MiB", _sent),
    ("TFLOP/s", _rate("flops_per_second", 1e12)),
    ("GB/s", _rate("bytes_per_second", 1e9)),
    ("tokens/s", lambda entry, row: f"{r:,.0f}" if (r := row["work"].get("tokens_per_second")) else None),
    ("MFU", lambda entry, row: f"{row['limit']['mfu']:.1%}" if "mfu" in row["limit"] else None),
    ("compile s", lambda entry, row: f"{s:.1f}" if (s := row["time"].get("compile")) is not None else None),
    ("recomputed", _recomputed),
    ("losses", lambda entry, row: " → ".join(f"{loss:.3f}" for loss in row["losses"]) if "losses" in row else None),
    ("ratio to peer", _ratio),
    ("goal", _goal),
    ("of limit", lambda entry, row: f"{row['limit']['fraction']:.0%}" if row["limit"].get("fraction") else None),
    ("before backward", _before_backward),
    *((f"{name} MiB", _first_steps(*where)) for name, where in FIRST_STEPS.items()),
    ("tensors MiB", _tensors),
    ("workspace MiB", _workspace),
    ("peak MiB", lambda entry, row: mib(row["memory"]["peak"]) if "peak" in row["memory"] else None),
    ("budget MiB", lambda entry, row: mib(row["memory"]["budget"]) if "budget" in row["memory"] else None),
    ("verdict", lambda entry, row: row["verdict"]),
]
"""A column appears where some row of the question fills it."""

SILENT: dict[str, set[str]] = {"ranks": {"1"}}
"""Cells that, like empty ones, do not make their column appear."""

LEFT = ("case", "implementation", "ratio to peer", "goal", "workspace MiB", "verdict")


def render(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of each question's table; a case's implementations stand together, empty cells are a dash."""
    for question, group in groupby(_together(entries, _question), key=_question):
        rows = _together(list(group), _case)
        below = (
            *peaks_by_length(rows),
            *kernel_lines(rows, layout),
            *memory_lines(rows, layout),
            *stage_lines(rows, layout),
            *bucket_lines(rows, layout),
        )
        yield _title(question, rows), [*_table(rows), *below]


def _title(question: str | None, rows: list[Entry]) -> str:
    link = rows[0]["extra_info"].get("link")  # one for all rows of a run
    return (question or "other measurements") + (f" (two hosts, joined at {link})" if link else "")


def _question(entry: Entry) -> str | None:
    return entry["group"]


def _case(entry: Entry) -> str:
    return entry["extra_info"]["case"]["id"]


def _together(entries: list[Entry], key: Callable[[Entry], Any]) -> list[Entry]:
    """Entries of one key side by side; keys, and the entries of each, in the order they came."""
    order = {value: place for place, value in enumerate(dict.fromkeys(map(key, entries)))}
    return sorted(entries, key=lambda entry: order[key(entry)])


def _table(entries: list[Entry]) -> list[str]:
    grid = {
        name: values
        for name, cell in COLUMNS
        if set(values := [cell(entry, entry["extra_info"]) for entry in entries]) - {None} - SILENT.get(name, set())
    }
    return layout([dict(zip(grid, cells, strict=True)) for cells in zip(*grid.values(), strict=True)], LEFT)


def layout(rows: Sequence[Mapping[str, str | None]], left: Sequence[str] = ()) -> list[str]:
    """Lines of a table whose columns are the rows' keys, those in `left` to the left; None is a dash."""
    columns = []
    for name in rows[0]:
        texts = [name, *(row[name] or "-" for row in rows)]
        width = max(map(len, texts))
        columns.append([text.ljust(width) if name in left else text.rjust(width) for text in texts])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

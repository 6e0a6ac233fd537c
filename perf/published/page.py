"""The page of predicted memory beside what others have published."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from perf.published import UNITS
from perf.published.memory import RULES, Compared, compared, unknown
from shardmark.simulation.hardware import hardware

PAGE = Path("docs/published-memory.md")

HEAD = """# Predicted memory beside published figures

Written by `python -m perf.published`. Each program was rebuilt as its write-up has it (`perf/published/programs.py`)
and simulated by the rules of its GPU, without one. "allocated" and "peak" are what the caching allocator's blocks hold,
as `torch.cuda.memory_allocated` says; "at most" is what the allocator takes from the device for it, with its segments
and what lies free in them: the card must have that much, and the CUDA context's half a gigabyte beside it.

{summary}
"""


def write(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page: the rows of each source, and those that no prediction is held to, with the reason."""
    by_file = {file: compared(file) for file in RULES}
    errors = [100 * each.error for rows in by_file.values() for each in rows]
    again = sum("uncompiled" in each.row["experiment"] for rows in by_file.values() for each in rows)
    summary = (
        f"{len(errors)} figures of {len(by_file)} sources ({again} from a second run of the same programs): mean "
        f"error {fmean(map(abs, errors)):.3f}%, largest {max(errors, key=abs):+.3f}%, most under-predicted "
        f"{min(errors):+.3f}%."
    )
    parts = [HEAD.format(summary=summary)]
    for rows in by_file.values():
        parts.append(f"## {rows[0].row['source']}\n\n{_table(rows)}\n")
    parts.append("## Not held to a prediction\n\nCompiled programs, whose kernels a simulation runs, and:\n")
    lines = [
        f"| {row['case']} | {row['metric']} | {row['value']} {row['unit']} | {_predicted(found)} | {why} |"
        for row, why, found in unknown()
    ]
    parts.append("\n".join(["| case | what | published | predicted | why |", "|---|---|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _table(rows: list[Compared]) -> str:
    lines = ["| case | GPU | what | published | predicted | error | at most |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        row, unit = each.row, UNITS[each.row["unit"]]
        again = " (again)" if "uncompiled" in row["experiment"] else ""
        places = len(row["value"].partition(".")[2])
        shown = f"{each.predicted / unit:.{places}f}"
        lines.append(
            f"| {row['case']}{again} | {hardware(each.on).name} | {row['metric']} | {row['value']} {row['unit']} | "
            f"{shown} {row['unit']} | {100 * each.error:+.3f}% | {each.at_most / unit:.5g} {row['unit']} |"
        )
    return "\n".join(lines)


def _predicted(found: Compared | None) -> str:
    """Of a row that is not held to it."""
    if found is None:
        return ""
    return f"{found.predicted / UNITS[found.row['unit']]:.5g} {found.row['unit']} ({100 * found.error:+.1f}%)"

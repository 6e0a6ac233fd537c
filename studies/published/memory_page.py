"""The page of predicted memory beside what others have published."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from perf.published import UNITS
from shardmark.meter.hardware import hardware
from studies.published.memory_rows import RULES, Compared, compared, unknown

PAGE = Path("docs/published-memory.md")

HEAD = """# Predicted memory beside published figures

Written by `python -m studies.published`. Each program was rebuilt as its write-up has it
(`studies/published/programs.py`) and simulated by the rules of its GPU, without one. "allocated" and "peak" are what
the caching allocator's blocks hold, as `torch.cuda.memory_allocated` says; "reserved" is what the allocator takes
from the device for it, with its segments and what lies free in them; "at most" is the same where no stream is ever
ahead of what the host has waited for. The card must have that much, and the CUDA context's half a gigabyte and NCCL's
buffers beside it; or else the allocator waits, and gives back what is free.

{summary}

What is reserved depends on more than the program. A block that another stream reads too can be given out again only
once the host has seen that stream to be past it; the host is seconds ahead of the GPU at these sizes, and sees that
where it waits. Two things are assumed (`shardmark/predict/simulation/streams.py`): what is sent takes no time beside
what is computed, and loading cuBLAS's kernels waits for the GPU, as CUDA's guide says that loading may. Neither has a
number that could be fitted, but both were chosen with these two figures in view, and others would be as plausible:

- FSDP, after warm-up: if each reduce-scatter took longer than the host needs for its next operators, one block of 1 GiB
  more would be reserved, 6.2% above what was published.
- DDP, after warm-up: its broadcasts of parameters, which PyTorch's c10d marked so until 2025, leave seven blocks of
  1 GiB behind. Were they seen to be done at once, two would be left, and more taken later, 3.4% too much; were they
  seen only after the first step, the card would be full, 5.5% too much. The 0.5 GiB that are missing are as much as one
  activation: which broadcasts are done as the first one is allocated is for the clocks of host and GPU to say.
"""


def write(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page: the rows of each source, and those that no prediction is held to, with the reason."""
    by_file = {file: compared(file) for file in RULES}
    every = [each for rows in by_file.values() for each in rows]
    errors = [100 * each.error for each in every if not each.of_segments]
    of_segments = [100 * each.error for each in every if each.of_segments]
    again = sum("uncompiled" in each.row["experiment"] for each in every)
    summary = (
        f"{len(errors)} figures of {len(by_file)} sources ({again} from a second run of the same programs): mean "
        f"error {fmean(map(abs, errors)):.3f}%, largest {max(errors, key=abs):+.3f}%, most under-predicted "
        f"{min(errors):+.3f}%. {len(of_segments)} more are of what was reserved: largest error "
        f"{max(of_segments, key=abs):+.3f}%. No figure is above its bound."
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

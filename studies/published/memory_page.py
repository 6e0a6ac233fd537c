"""The page of predicted memory beside what others have published."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from perf.published import UNITS
from shardmark.meter.hardware import hardware
from studies.published import step_memory
from studies.published.memory_rows import RULES, Compared, compared, unknown

PAGE = Path("docs/published-memory.md")

HEAD = """# Predicted memory beside published figures

This page answers how far the predicted bytes are from those that others have published.

Written by `python -m studies.published`. Each program was rebuilt from its write-up (`studies/published/programs.py`)
and simulated by the rules of its GPU, without one. The figures are:

- **allocated** and **peak**: the bytes of the caching allocator's blocks, as in `torch.cuda.memory_allocated`;
- **reserved**: the bytes that the allocator takes from the device for them, with the free space in its segments;
- **at most**: reserved bytes if no stream is ever ahead of what the host has waited for. The card must have these
  bytes, half a gigabyte for the CUDA context, and NCCL's buffers. Otherwise the allocator waits, and frees what it can.

{summary}

Reserved memory depends on more than the program. The allocator can reuse a block that another stream reads only once
the host has seen that the stream is past it. At these sizes the host is seconds ahead of the GPU, and sees this only
when it waits. The simulation makes two assumptions (`shardmark/predict/simulation/streams.py`): communication takes no
time beside computation, and loading cuBLAS's kernels waits for the GPU, which CUDA's guide says may happen. Neither
has a number to fit. But both were chosen with these two figures in view, and others would be as plausible:

- FSDP, after warm-up: if each reduce-scatter took longer than the host needs for its next operators, one more block of
  1 GiB would be reserved, 6.2% above the published figure.
- DDP, after warm-up: its broadcasts of parameters use `record_stream`, as PyTorch's c10d did until 2025, and leave
  seven blocks of 1 GiB behind. If the host saw at once that they were done, two would be left and more would be taken
  later, 3.4% too much. If it saw this only after the first step, the card would be full, 5.5% too much. The missing
  0.5 GiB are the size of one activation. They depend on which broadcasts are done when the first activation is
  allocated, and so on the clocks of host and GPU.
"""

STEPS = """## Whole training steps

These are lines of `perf/published/training_steps.csv`: steps of 20 million to 71 billion parameters on one GPU to 160,
each as its source's own repository wrote it at the time (`studies/published/whole_steps.py`). Bytes depend on
details that hardly change seconds: which norm saves float32, who holds the logits in backward, which gradients stay
whole between micro-batches. Where a case says compiled, torchtitan compiles each block and KempnerForge the model; on
one GPU its backward is one graph, and the 0.8 GiB that are missing there are not explained. With `tp` each product is
cut over so many ranks, and the sequence between products (`studies/published/sequence_parallel.py`); these cases are
predicted as they are before they are compiled, as their peak is that of the loss; why that of 70 billion parameters on
8 GPUs is 3% too high is not explained. Figures of pull request 165 are percentages of its GPU's 95.04 GiB.

{summary}

**Active** memory is allocated, or freed while other streams use it. The FSDP that is simulated is today's PyTorch's,
but that FSDP2 allocated inputs of reduce-scatters on their own stream until July 2024 (pytorch/pytorch#129721).
"""


def page() -> str:
    """The page's text: each source's rows, and the rows without a prediction, with the reason."""
    by_file = {file: compared(file) for file in RULES}
    every = [each for rows in by_file.values() for each in rows]
    errors = [100 * each.error for each in every if not each.of_segments]
    of_segments = [100 * each.error for each in every if each.of_segments]
    again = sum("uncompiled" in each.row["experiment"] for each in every)
    summary = (
        f"{len(errors)} figures of {len(by_file)} sources ({again} from a second run of the same programs): mean "
        f"error {fmean(map(abs, errors)):.3f}%, largest {max(errors, key=abs):+.3f}%, most under-predicted "
        f"{min(errors):+.3f}%. {len(of_segments)} more are of reserved memory: largest error "
        f"{max(of_segments, key=abs):+.3f}%. None of these is above its bound."
    )
    parts = [HEAD.format(summary=summary)]
    for rows in by_file.values():
        parts.append(f"## {rows[0].row['source']}\n\n{_table(rows)}\n")
    parts += _whole_steps()
    parts.append("## Not held to a prediction\n\nCompiled programs other than those above, and:\n")
    lines = [
        f"| {row['case']} | {row['metric']} | {row['value']} {row['unit']} | {_predicted(found)} | {why} |"
        for row, why, found in unknown()
    ]
    parts.append("\n".join(["| case | what | published | predicted | why |", "|---|---|---|---|---|", *lines]) + "\n")
    lines = [
        f"| {source} | {', '.join(map(str, numbers))} | {why} |" for source, numbers, why in step_memory.not_written()
    ]
    parts.append("\n".join(["| training steps of | lines | why |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _whole_steps() -> list[str]:
    """The section of whole training steps: a summary, and each source's rows."""
    every = step_memory.compared()
    peaks = [100 * each.error for each in every if not each.of_segments]
    reserved = [100 * each.error for each in every if each.of_segments]
    equal = sum(shown(each) == each.row["value"] for each in every if not each.of_segments)
    above = sum(each.published > each.at_most for each in every)
    summary = (
        f"{len(peaks)} figures of allocated or active memory: median error {median(map(abs, peaks)):.2f}%, largest "
        f"{max(peaks, key=abs):+.2f}%; {equal} are predicted to the published digit. {len(reserved)} of reserved "
        f"memory: median error {median(map(abs, reserved)):.1f}%, largest {max(reserved, key=abs):+.1f}%; {above} are "
        f"above *at most*."
    )
    assert not any(each.published > each.at_most for each in every if not each.of_segments)
    tables = [
        f"### {source}\n\n{_table(list(rows))}\n" for source, rows in groupby(every, lambda each: each.row["source"])
    ]
    return [STEPS.format(summary=summary), *tables]


def _table(rows: list[Compared]) -> str:
    lines = ["| case | GPU | what | published | predicted | error | at most |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        row, unit = each.row, UNITS[each.row["unit"]]
        again = " (again)" if "uncompiled" in row.get("experiment", "") else ""
        lines.append(
            f"| {row['case']}{again} | {hardware(each.on).name} | {row['metric']} | {row['value']} {row['unit']} | "
            f"{shown(each)} {row['unit']} | {100 * each.error:+.3f}% | {each.at_most / unit:.5g} {row['unit']} |"
        )
    return "\n".join(lines)


def shown(found: Compared) -> str:
    """The prediction in the unit and with the digits of the published figure."""
    places = len(found.row["value"].partition(".")[2])
    return f"{found.predicted / UNITS[found.row['unit']]:.{places}f}"


def _predicted(found: Compared | None) -> str:
    """The cell with the prediction of a row that is not held to it."""
    if found is None:
        return ""
    return f"{found.predicted / UNITS[found.row['unit']]:.5g} {found.row['unit']} ({100 * found.error:+.1f}%)"

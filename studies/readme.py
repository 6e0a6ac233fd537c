"""README's table of figures: some rows of the record of two CPU cores, written by `studies/record.py --keep`."""

from __future__ import annotations

from typing import Any

from shardmark.report.questions import KNOWN

MACHINE = "two-cores-cpu"
BEGIN, END = "<!-- figures: studies/record.py writes them -->\n", "<!-- end of the figures -->\n"

COLUMNS = ("case", "time ms", "ratio to peer", "tensors MiB", "budget MiB", "verdict")
ROWS = {
    "attention, `eager`": "perf/test_attention.py::test_memory_by_length[eager-b2-s2048-d64-full-float32-both]",
    "attention, `sdpa`": "perf/test_attention.py::test_memory_by_length[sdpa-b2-s2048-d64-full-float32-both]",
    "loss, `eager`": "perf/test_loss.py::test_time_and_memory[eager-t1024-d128-v8192-float32]",
    "loss, `fused_pytorch`": "perf/test_loss.py::test_time_and_memory[fused_pytorch-t1024-d128-v8192-float32]",
    "checkpointing, `none`": "perf/test_checkpointing.py::test_training_step[none-deep-b2-s256-float32-step]",
    "checkpointing, `full`": "perf/test_checkpointing.py::test_training_step[full-deep-b2-s256-float32-step]",
    "data parallel, `naive`": "perf/test_data_parallel.py::test_training_step[naive-mini-b2-s32-float32-step-2ranks]",
    "data parallel, `bucketed`": (
        "perf/test_data_parallel.py::test_training_step[bucketed-mini-b2-s32-float32-step-2ranks]"
    ),
    "ZeRO-1, `sharded`": (
        "perf/test_sharded_optimizer.py::test_sharded_optimizer[sharded-mini-b2-s32-float32-step-2ranks]"
    ),
    "FSDP, `sharded`": "perf/test_fsdp.py::test_training_step[sharded-mini-b2-s32-float32-step-2ranks]",
}
"""What README calls it, and the full name of its test: what is simple, and what is there to beat it."""


def with_figures(text: str, run: dict[str, Any]) -> str:
    """The text with the run's figures between BEGIN and END, in the place of what stands there."""
    entries = {entry["fullname"]: entry for entry in run["benchmarks"]}
    lines = [f"| technique | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for called, name in ROWS.items():
        cells = [called, *(_cell(column, entries[name]) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(lines) + f"\n{END}" + rest.split(END)[1]


def _cell(name: str, entry: dict[str, Any]) -> str:
    column = KNOWN[name]
    cell = column.brief or column.cell
    return cell(entry, entry["extra_info"]) or "-"

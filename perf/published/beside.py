"""Published figures of attention, all-reduce, data parallelism and sharded optimizers, with the rows of ours that have
the same sizes."""

from __future__ import annotations

import re

from perf.published import Counterpart, Row, published
from shardmark.report.plots import Points

TIMES = {"forward": "time.parts.forward", "backward": "time.parts.backward", "step": "stats.median"}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _attention(row: Row) -> Counterpart | None:
    """Times, and the memory that forward leaves: at the peak the write-ups let gradients add up."""
    if "compiled" in row["experiment"]:  # the same tables again, beside the compiler's
        return None
    width, length = _numbers(row["case"])
    ours = f"eager b8-s{length}-d{width}-full-float32-both 1"
    if "memory" in row["metric"]:
        before = row["metric"] in ("memory before backward", "memory allocated")
        return ("memory before backward", ours, "memory.phases.after_forward") if before else None
    part = row["metric"].removesuffix(" mean")
    return (part, ours, TIMES[part]) if part in TIMES else None


def _flash_attention(row: Row) -> Counterpart | None:
    """Both passes together; the other metrics are parts of it."""
    passes, _, variant = row["metric"].partition(", ")
    if passes != "forward + backward":
        return None
    length, width, _ = _numbers(row["case"])
    dtype = "float32" if row["case"].endswith("fp32") else "bfloat16"
    ours = {"eager": "eager", "flash triton": "flash_triton"}[variant]
    return f"{passes}, {variant}", f"{ours} b1-s{length}-d{width}-causal-{dtype}-both 1", "stats.median"


def _all_reduce(row: Row) -> Counterpart | None:
    """Over NCCL. That of gloo is a matter of the hosts, which are not named."""
    if row["metric"] != "mean time" or "gloo" in row["case"]:
        return None
    size, ranks = _numbers(row["case"])
    return "time", f"backend all_reduce-{size}MB {ranks}", "stats.median"


WRAPPERS = {"naive": "naive", "flat": "flat", "torch-style": "bucketed"}


def _data_parallel(row: Row) -> Counterpart | None:
    """A batch of 4 is 2 sequences a rank. On H100s batch and context are not said, so no row has the same."""
    name = WRAPPERS.get(re.split("[ ,]", row["case"])[0])
    ours = f"{name} xl-b2-s512-float32-step 2" if "batch 4" in row["experiment"] and name else ""
    where = {"gradient communication": "time.parts.communication", "optimizer step": "time.parts.optimizer"} | TIMES
    return (row["metric"], ours, where[row["metric"]]) if row["unit"] != "bool" else None


def _sharded_optimizer(row: Row) -> Counterpart:
    """Batch and context are not said: the column of rows says which are ours."""
    name = "unsharded" if row["case"] == "not sharded" else "sharded"
    where = {"peak memory": "memory.peak", "step": "stats.median"}[row["metric"]]
    return row["metric"], f"{name} xl-.*-float32-step 2", where


ATTENTION = Points(
    "Attention without heads, published and ours",
    {},
    {"forward": "s", "backward": "s", "memory before backward": "B"},
    published("cs336_a100", "attention, batch 8, no heads, fp32, 100 passes", ours=_attention)
    + published("cs336_stanford336", "attention, batch 8, no heads", ours=_attention),
    "Published and predicted memory has cuBLAS's workspaces among it, which rows here have apart.",
)
FLASH_ATTENTION = Points(
    "Causal attention, published and ours",
    {},
    {f"forward + backward, {variant}": "s" for variant in ("eager", "flash triton")},
    published("cs336_stanford336", "flash attention", "seq", ours=_flash_attention),
)
ALL_REDUCE = Points(
    "All-reduce, published and ours",
    {},
    {"time": "s"},
    published("cs336_a100", "all-reduce", ours=_all_reduce)
    + published("cs336_stanford336", "all-reduce", ours=_all_reduce),
)
DATA_PARALLEL = Points(
    "Data parallelism, published and ours",
    {},
    dict.fromkeys(("step", "forward", "backward", "gradient communication", "optimizer step"), "s"),
    published("cs336_a100", "data parallel", ours=_data_parallel)
    + published("cs336_stanford336", "data parallel", ours=_data_parallel),
    "On H100s batch and context are not said: of those only communication is predicted.",
)
SHARDED_OPTIMIZER = Points(
    "A sharded optimizer, published and ours",
    {},
    {"peak memory": "B", "step": "s"},
    published("cs336_stanford336", "optimizer state sharding", ours=_sharded_optimizer),
    "Their batch and context are not said, so nothing is predicted; those of our row are in its name.",
)

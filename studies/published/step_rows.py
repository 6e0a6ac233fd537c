"""Rows of `training_steps.csv`: each as a training with its seconds, or the reason why it is none.

A column that the source leaves empty is filled from `SOURCES`, which says what the source's own repository does there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch

from perf.published import rows_of
from shardmark.meter.hardware import Hardware, hardware
from studies.published.decoders import DecoderSize
from studies.published.rules import Row
from studies.published.training import Training

FILE = "training_steps"
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {"bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class Published:
    """A row with its seconds for one step, as a training on a device."""

    line: int
    """Its line in the file."""
    source: str
    authors: str
    """Sources of the same authors are fitted or held out together."""
    training: Training
    on: Hardware
    seconds: float

    @property
    def chip(self) -> str:
        """The chip of its device: A100s share one, and H100s and the H200."""
        return "a100" if self.on.name.startswith("a100") else "h100"

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU takes in a second."""
        return self.training.tokens / self.seconds


AUTHORS = {
    "mosaicml": "MosaicML",
    "litgpt": "Lightning AI",
    "torchtitan": "torchtitan",
    "fms-fsdp|maximizing-training": "IBM",
    "Kempner": "Kempner Institute",
    "dlrover": "dlrover",
    "daddyofadoggy": "daddyofadoggy",
}
_COMPOSER = {"optimizer": "loop", "autocast": True, "prefetch_late": True, "master": FP32}
_TITAN = {"optimizer": "fused", "master": FP32, "reduce": FP32}
SOURCES: dict[str, dict[str, Any]] = {
    # "MP Mode DEFAULT" is Composer's for float32 reduction; its FSDP gathers for backward late, and reduces each
    # micro-batch.
    "llm-foundry": {"family": "mpt", "reduce": FP32, **_COMPOSER},
    "extensions/thunder": {"optimizer": "fused", "master": BF16, "reduce": BF16, "iteration": True},
    "torchtitan/pull/165": {"optimizer": "foreach", "master": FP32, "selective": "selective op"},
    "llama3_h100_202412": {**_TITAN, "vocab": 128_256, "seq_len": "8192", "selective": "selective op"},
    "torchtitan docs/performance": _TITAN,
    "fms-fsdp": {"optimizer": "foreach", "master": FP32},
    # Selective: its HFU is 59/51 of its MFU, so about half of the blocks are recomputed.
    "maximizing-training": {"optimizer": "foreach", "master": FP32, "reduce": BF16, "selective": "selective layer"},
    "KempnerForge": {"optimizer": "fused", "master": BF16},
    "dlrover": {"optimizer": "foreach", "master": FP32, "reduce": BF16},
    "daddyofadoggy": {"optimizer": "foreach", "master": BF16, "reduce": BF16},
}
SIZES = {
    "llama27b": (32, 4096, 32, 32, 11_008, 32_000),
    "llama213b": (40, 5120, 40, 40, 13_824, 32_000),
    "llama234b": (48, 8192, 64, 8, 22_016, 32_000),
    "llama270b": (80, 8192, 64, 8, 28_672, 32_000),
    "llama7b": (32, 4096, 32, 32, 11_008, 32_000),
    "llama38b": (32, 4096, 32, 8, 14_336, 128_256),
    "llama318b": (32, 4096, 32, 8, 14_336, 128_256),
    "llama370b": (80, 8192, 64, 8, 28_672, 128_256),
    "smollm33b": (36, 2048, 16, 4, 11_008, 128_256),
    "20m": (4, 256, 4, 4, 768, 32_000),
    "77m": (8, 512, 8, 4, 1536, 50_257),
}
"""By the models' names: layers, width, heads, key and value heads, width of the feed-forward network, vocabulary."""

Test = tuple[str, str, str]
"""A regular expression for the source, one for "column=value" of any column, and why such a row has no training."""
UNKNOWN: tuple[Test, ...] = (
    ("", "compile=(yes|loss)", "compiled: its kernels are the compiler's"),
    ("", "compute_dtype=(float8|FP8)", "float8 linears, whose casts are the library's own kernels"),
    ("", "model=.*LoRA|torchtune", "LoRA, which this study does not write"),
    ("", "model=.*(MoE|GPT-OSS)", "a mixture of experts: which tokens an expert gets is not said"),
    ("", "parallelism=.*(DeepSpeed|ColossalAI|Megatron)", "another library than PyTorch shards it"),
    ("", "tp=[2-9]", "tensor parallel, which this study does not write"),
    ("", "pp=[2-9]", "pipeline parallel, which this study does not write"),
    ("torchtune", "", "compiled, and which parameters train is not said"),
    ("OLMo|olmo", "", "batch, parallelism and compiler are not said"),
    ("picotron", "", "batch, parallelism and kernels are not said"),
    ("nanoGPT", "", "the GPU, or whether it is compiled, is not said"),
    ("flash-attention", "", "batch and parallelism are not said; kernels are its own fused ones"),
    ("jzhang38", "", "norms, SwiGLU, RoPE and loss are flash-attention's own fused kernels"),
    ("nanotron", "", "tensor parallel, which this study does not write"),
    ("llama-cookbook|chenyaofo|resource-tables", "", "no time"),
    (
        "thunder",
        "ms_per_iter=(333.56|426.44|356.01|373.37|322.25)",
        "compiled by Thunder: its kernels are the compiler's",
    ),
    ("dlrover", "tflops_per_gpu=(177.9|165.03|160.69)", "LoRA, which this study does not write"),
    ("hpcaitech", "", "float16 with PyTorch Lightning's own scaling and checkpoints, which are not said"),
)


def why_unknown(row: Row) -> str:
    """The reason why the row has no training; empty if it has one."""
    for source, test, why in UNKNOWN:
        if re.search(source, row["source"]) and any(
            re.search(f"^{test}" if test else "", f"{k}={v}") for k, v in row.items()
        ):
            return why
    return ""


def numbered() -> Iterator[tuple[int, Row]]:
    """Each row with its line in the file."""
    yield from enumerate(rows_of(FILE), 2)


def published_of(line: int, row: Row) -> Published | None:
    """The row as a training; None where `why_unknown` says why."""
    if why_unknown(row):
        return None
    rest = next((given for name, given in SOURCES.items() if name in row["source"]), {})
    training = _training(row, rest)
    authors = next(name for test, name in AUTHORS.items() if re.search(test, row["source"]))
    return Published(line, row["source"], authors, training, _device(row), _seconds(row, training))


def _training(row: Row, rest: dict[str, Any]) -> Training:
    length = _number(row["seq_len"] or rest["seq_len"])
    strategy = row["parallelism"]
    kind = next(k for name, k in KINDS.items() if re.match(name, strategy))
    ranks = int(row["gpus"])
    accumulated = int(row["grad_accum"] or 1)
    iteration = rest.get("iteration", False)
    checkpoints = row["activation_checkpointing"]
    checkpoints = rest.get("selective", checkpoints) if checkpoints == "selective" else checkpoints
    return Training(
        size=_size(row, rest),
        length=int(length),
        batch=int(row["batch_per_gpu"]),
        micro_batches=1 if iteration else accumulated,
        strategy=kind,
        ranks=ranks,
        per_node=min(ranks, int(row["gpus_per_node"] or 8)),
        master=rest.get("master", FP32),
        reduce=DTYPES.get(row["reduce_dtype"]) or rest.get("reduce", BF16),
        checkpoint_every={"full": 1, "selective layer": 2, "selective op": 1}.get(checkpoints, 0),
        saves_operators=checkpoints == "selective op",
        optimizer="fused" if row["optimizer_impl"] == "fused" else rest.get("optimizer", "foreach"),
        autocast=rest.get("autocast", False),
        prefetch_late=rest.get("prefetch_late", False),
        reshard="reshard_after_forward=False" not in strategy,
        iteration=iteration,
    )


KINDS = {"FSDP1 HSDP": "hsdp", "FSDP2": "fsdp2", "FSDP": "fsdp1", "DDP": "ddp", "one GPU": "one GPU"}


def _size(row: Row, rest: dict[str, Any]) -> DecoderSize:
    family = rest.get("family", "llama")
    columns = ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab")
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower())
    named = SIZES.get(name)
    if row["source"].startswith("Kempner"):
        named = (0, 0, 0, 0, 14_336, 0) if named is None else named
    if named is None and row["source"].find("torchtitan") >= 0:
        named = SIZES["llama38b" if "8b" in name else "llama370b"]
    found = [_whole(row[column]) or (named[i] if named else 0) for i, column in enumerate(columns)]
    assert all(found), (row["source"], row["model"], found)
    return DecoderSize(family, *found)


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _device(row: Row) -> Hardware:
    """The device; between nodes, the rate that the source says, of a node or of a GPU."""
    gpu, memory = row["gpu"].split("-")[0].split()[0], row["gpu_memory"]
    if gpu == "A100":
        on = hardware("a100-40gb" if memory.startswith("40") else "a100-80gb")
    elif gpu == "H200":
        on = hardware("h200")
    else:
        on = hardware("h100-96gb" if memory.startswith(("95", "96")) else "h100-80gb")
    ranks_in_node = int(row["gpus_per_node"] or 8)
    said = re.search(r"(\d+) ?Gb(?:ps|/s)", row["network"])
    if said:
        share = 1 if "per GPU" in row["network"] or "NDR" in row["network"] else ranks_in_node
        on = replace(on, network=int(said[1]) * 1e9 / 8 / share)
    return replace(on, devices_per_node=ranks_in_node)


def _number(text: str) -> float:
    """A figure; the mean of a range. "4k" tokens of context are 4,096."""
    if text == "4k":
        return 4096.0
    parts = [float(each.rstrip("kK")) * (1000 if each[-1] in "kK" else 1) for each in text.replace(",", "").split("-")]
    return fmean(parts)


def _seconds(row: Row, training: Training) -> float:
    """Seconds of a step, by the figure of the row that has the most digits."""
    if len(row["step_s"].replace(".", "").lstrip("0")) > 2:
        return _number(row["step_s"])
    if row["ms_per_iter"]:
        return _number(row["ms_per_iter"]) / 1e3
    if row["tokens_per_s_per_gpu"]:
        return training.tokens / _number(row["tokens_per_s_per_gpu"])
    if row["tflops_per_gpu"]:
        return _flops(training) / _number(row["tflops_per_gpu"]) / 1e12
    return training.tokens * training.ranks / _number(row["tokens_per_s_total"])


def _flops(training: Training) -> float:
    """FLOPs of forward, backward and forward again, with attention's whole squares: what dlrover divides by seconds."""
    size = training.size
    attention = 4 * size.layers * training.length * size.width
    return training.tokens * (2 * size.products + attention) * (4 if training.checkpoint_every else 3)


@cache
def every() -> list[Published]:
    """Rows whose program can be written."""
    return [found for line, row in numbered() if (found := published_of(line, row)) is not None]


@cache
def compiled() -> list[Published]:
    """Rows that are compiled and whose program can be written but for that. No number is fitted to them."""
    rows = ((line, row) for line, row in numbered() if row["compile"] == "yes")
    return [found for line, row in rows if (found := compiled_of(line, row)) is not None]


def compiled_of(line: int, row: Row) -> Published | None:
    """The row as a compiled training; None if its eager program cannot be written either."""
    found = published_of(line, row | {"compile": "no"})
    return found and replace(found, training=replace(found.training, compiled=True))

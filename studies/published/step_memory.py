"""Published peak memory of whole training steps beside what is predicted for their programs.

Each program is that of its source's own repository at the time, as `WRITTEN` says; nothing is fitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from studies.published.decoders import WideRMSNorm
from studies.published.memory_rows import PEAK, RESERVED, Compared, beside, held
from studies.published.rules import Row
from studies.published.step_rows import Published, compiled_of, numbered, published_of, why_unknown
from studies.published.whole_steps import HoldingRMSNorm, WiderRMSNorm, Written, program

FP32 = torch.float32
RESERVED_METRIC = "memory reserved"
FIGURES = {"peak memory": PEAK, "peak active memory": "peak_active", RESERVED_METRIC: RESERVED}

# March 2024: the model returns float32 logits, which the loop holds in backward; its table is for 2 x 32,768 positions.
_TITAN_2024_03 = {"float32_logits": "model", "keeps_logits": True, "on_reduce_stream": True, "positions": 65_536}
_TITAN_2024_12 = {"float32_logits": "loss", "keeps_logits": False}
_TITAN = {"norm": WideRMSNorm, "from_meta": True, "keeps_last": True, "keeps_root": True}
WRITTEN: dict[str, dict[str, Any]] = {
    "torchtitan/pull/165": _TITAN | _TITAN_2024_03,
    "llama3_h100_202412": _TITAN | _TITAN_2024_12,
    # Fabric makes what the model returns float32, and the loss's function frees both. Its README: batches of 512 rows
    # but under FSDP, where they are 32.
    "extensions/thunder": {
        "norm": HoldingRMSNorm,
        "float32_logits": "loss",
        "keeps_logits": False,
        "cuts_heads": True,
    },
    # Between micro-batches FSDP2 keeps whole gradients, in the dtype of their reduction.
    "KempnerForge": {"norm": WiderRMSNorm, "float32_logits": "", "keeps_logits": True},
}
TRAINED: dict[str, dict[str, Any]] = {"torchtitan/pull/165": {"reduce": FP32}, "extensions/thunder": {"clips": False}}
"""By source, where its training is another than `step_rows.SOURCES` says, as seconds do not show."""
COMPILES = {"llama3_h100_202412": "blocks", "KempnerForge": "model"}
"""By source: the compiled part, in rows that are compiled."""
CUTS = ("KempnerForge",)
"""Sources whose tensor parallelism is written. Compiled rows of it are run eagerly: their peak is that of the loss,
which is not compiled, and each of their blocks would be compiled anew."""
OTHERS = {
    "dlrover": "its library replaces attention and norms by kernels of its own, which are not said",
    "daddyofadoggy": "a range of whole GB, and not said of what",
}
"""Sources whose steps are predicted and whose memory is not, and why."""


def written_of(published: Published, tensor_parallel: int = 1) -> Written | None:
    """The row's step as its source writes it, its products cut over so many ranks; None where its repository is not
    read that closely."""
    source = next((source for source in WRITTEN if source in published.source), None)
    if source is None:
        return None
    training = replace(published.training, **TRAINED.get(source, {}))
    accumulates = training.micro_batches > 1 or (source == "extensions/thunder" and training.strategy != "fsdp1")
    return Written(
        training=replace(
            training,
            micro_batches=2 if accumulates else 1,  # a third one finds what the second one found
            sync_last_only=accumulates,
        ),
        compiles=COMPILES[source] if training.compiled and tensor_parallel == 1 else "",
        tensor_parallel=tensor_parallel,
        # KempnerForge cuts a model on the meta device, which would not be there whole on each rank.
        **WRITTEN[source] | ({"from_meta": True} if tensor_parallel > 1 else {}),
    )


def _is_compiled(row: Row) -> bool:
    """Whether the row's program is compiled, and by a source that `COMPILES` names."""
    return row["compile"] == "yes" and any(source in row["source"] for source in COMPILES)


def _cut_over(row: Row) -> int:
    """Tensor parallel ranks, of a source that `CUTS` names."""
    return int(row["tp"] or 1) if any(source in row["source"] for source in CUTS) else 1


def _uncut(row: Row) -> Row:
    """The row without its tensor parallelism, if that is written. With tensor parallelism alone KempnerForge
    has FSDP2 over one rank."""
    if _cut_over(row) == 1:
        return row
    return row | {"tp": "1", "parallelism": re.sub(r"(^| x )TP \d+", "", row["parallelism"]) or "FSDP2 1"}


def _published(line: int, row: Row) -> Published | None:
    """The row as a training, whose products are not cut; None where `why_unknown` says why."""
    return (compiled_of if _is_compiled(row) else published_of)(line, _uncut(row))


def rows() -> Iterator[tuple[Row, Published, Written]]:
    """A row for each published figure, with its source, case, metric, value and unit."""
    for line, row in numbered():
        published = _published(line, row)
        written = written_of(published, _cut_over(row)) if published is not None and row["peak_memory"] else None
        if published is None or written is None:
            continue
        training, tp = written.training, written.tensor_parallel
        where = f"{training.strategy} on {training.ranks}" if training.ranks > 1 else training.strategy
        where += f", tp={tp}" if tp > 1 else ""
        checkpoints = f", {row['activation_checkpointing']} checkpoints" if training.checkpoint_every else ""
        case = f"{row['model']}, {where}{checkpoints}" + ", compiled" * training.compiled
        for metric, value, unit in _figures(row):
            yield (
                {"source": row["source"], "case": case, "metric": metric, "value": value, "unit": unit},
                published,
                written,
            )


def _figures(row: Row) -> Iterator[tuple[str, str, str]]:
    """Metric, value and unit of each figure of a row. KempnerForge's GB are 2 ** 30 bytes; torchtitan's percentages
    are of its GPU's memory, and its single figure is what is reserved."""
    values, unit = re.findall(r"[\d.]+", row["peak_memory"]), row["peak_memory_unit"]
    whole = re.fullmatch(r"% of ([\d.]+) GiB", unit)
    if whole:
        for metric, value in zip(("peak active memory", RESERVED_METRIC), values, strict=True):
            yield metric, f"{float(value) / 100 * float(whole[1]):.2f}", "GiB"
    else:
        metric = "peak memory" if row["peak_memory_kind"] == "allocated" else RESERVED_METRIC
        yield metric, values[0], "GiB" if "Kempner" in row["source"] else unit


def compared() -> list[Compared]:
    """The published figures beside their predictions."""
    return [compared_of(*each) for each in rows()]


def compared_of(row: Row, published: Published, written: Written) -> Compared:
    """The published figure beside its prediction."""
    on = published.on.name
    at = held(program(written), on, written.training.ranks)["done"]
    return beside(row, on, at, FIGURES[row["metric"]])


def not_written() -> Iterator[tuple[str, list[int], str]]:
    """By source and reason: the lines of the file whose memory is not predicted."""
    why: dict[tuple[str, str], list[int]] = {}
    for line, row in numbered():
        if row["peak_memory"]:
            found = _published(line, row)
            if found is None:
                eager = _uncut(row) | ({"compile": "no"} if _is_compiled(row) else {})
                why.setdefault((row["source"], why_unknown(eager)), []).append(line)
            elif written_of(found) is None:
                reason = next(reason for source, reason in OTHERS.items() if source in row["source"])
                why.setdefault((row["source"], reason), []).append(line)
    for (source, reason), lines in why.items():
        yield source, lines, reason

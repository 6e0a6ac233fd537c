"""Published step times beside what is predicted for the same programs, row by row.

    python -m studies.published        # writes docs/published-times.md
    python -m studies.published.fit    # fits rates to one half, and writes them

Rates are fitted to one half of a file's configurations and judged by the other. The Thue-Morse sequence divides them,
as it never falls in step with a grid of sizes.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from perf.published import UNITS, rows_of
from shardmark.meter.hardware import Hardware, hardware
from shardmark.predict.simulation import schedule
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.rates import GPU
from studies.published import steps
from studies.published.programs import fused_softmax, softmax_by_parts
from studies.published.rules import Row, Rules, Unknown, by_rule, why_unknown
from studies.published.steps import Timed
from studies.published.traces import trace

FILES = ("cs336_a100", "cs336_stanford336", "simple_pytorch", "odsc_fsdp")
HOSTS = Path(__file__).with_name("hosts.toml")


@dataclass(frozen=True)
class Reading:
    """How a published time is predicted: the program, where it runs, its host, and the timed parts."""

    program: Timed
    on: str
    ranks: int
    host: str
    """A name in `hosts.toml`: each table of a write-up has a program and a machine of its own."""
    parts: tuple[str, ...]
    zeroed: int = 0
    """Bytes that the device zeroes while the host begins to launch."""


@dataclass(frozen=True)
class Compared:
    """A published time, the predicted one and the lower bound, in seconds; and whether rates are fitted to it."""

    row: Row
    reading: Reading
    published: float
    predicted: float
    at_least: float
    fitted: bool

    @property
    def error(self) -> float:
        """Error relative to the published time."""
        return self.predicted / self.published - 1


FORWARD, BACKWARD, OPTIMIZER = ("forward",), ("backward",), ("optimizer step",)
STEP = (*FORWARD, *BACKWARD, *OPTIMIZER)
PARTS = {
    "forward mean": FORWARD,
    "backward mean": BACKWARD,
    "forward + backward mean": FORWARD + BACKWARD,
    "training step mean": STEP,
    "forward": FORWARD,
    "backward": BACKWARD,
    "forward, eager": FORWARD,
    "backward, eager": BACKWARD,
    "forward + backward, eager": ("forward + backward",),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
A100, H100 = "a100-80gb", "h100-80gb"


def _transformer_a100(row: Row) -> Reading:
    """The float32 rows of mixed precision repeat those under the profiler."""
    [(size, length, dtype)] = re.findall(r"(\S+) \(\d+ parameters\), seq (\d+), (fp32|bf16)", row["case"])
    parts = PARTS[row["metric"]]
    program = steps.transformer(size.lower(), int(length), DTYPES[dtype], optimizer=parts == STEP)
    profiled = "profiler" in row["experiment"] or "mixed" in row["experiment"]
    return Reading(program, A100, 1, "a100 models profiled" if profiled else "a100 models", parts)


def _attention_a100(row: Row) -> Reading:
    width, length = map(int, re.findall(r"\d+", row["case"]))
    host = "a100 attention, uncompiled" if "uncompiled" in row["experiment"] else "a100 attention"
    return Reading(steps.attention(width, length, fused_softmax), A100, 1, host, PARTS[row["metric"]])


def _all_reduce_a100(row: Row) -> Reading:
    """MB are of 2^20 bytes, as the bandwidth beside them shows."""
    size, ranks = map(int, re.findall(r"\d+", row["case"]))
    return Reading(steps.all_reduce(size * 2**20), A100, ranks, "a100 models", ("mean time",))


def _data_parallel_a100(row: Row) -> Reading:
    """A batch of 4 is 2 sequences a rank: forward takes less than half of what one device takes for 4."""
    wrapper = "bucketed" if row["case"].startswith("torch-style") else row["case"]
    every = (*FORWARD, *BACKWARD, "gradient communication", *OPTIMIZER)
    parts = every if row["metric"] == "step" else (row["metric"],)
    return Reading(steps.xl_on_ranks(wrapper, 2, 512), A100, 2, "a100 models", parts)


SIZES = {"small": "small", "medium": "medium", "med": "medium", "large": "large", "xl": "xl", "xlarge": "xl"}


def _transformer_h100(row: Row) -> Reading:
    """The handout's batch of 4 and 128 tokens. The time called backward is that of forward and backward: on the A100 it
    equals the other write-up's time of both together.
    """
    size = SIZES.get(row["case"].lower(), "2.7b")
    dtype = torch.bfloat16 if "bf16" in row["metric"] else torch.float32
    parts = FORWARD if row["metric"].startswith("forward") else FORWARD + BACKWARD
    on, host = {
        "forward and backward": (H100, "h100 models"),
        "mixed precision": (A100, "a100 models, stanford336"),
        "torch.compile of the model": (H100, "h100 models, compile"),
    }[row["experiment"]]
    return Reading(steps.transformer(size, 128, dtype), on, 1, host, parts)


def _attention_h100(row: Row) -> Reading:
    """Forward takes the same time at all lengths, so its author did not wait for the device. Beside torch.compile, the
    time says that softmax is PyTorch's.
    """
    width, length = map(int, re.findall(r"\d+", row["case"]))
    softmax = fused_softmax if "compile" in row["experiment"] else softmax_by_parts
    program = steps.attention(width, length, softmax, waits=False)
    host = "h100 attention, compile" if "compile" in row["experiment"] else "h100 attention"
    return Reading(program, H100, 1, host, PARTS[row["metric"]])


def _causal_attention_h100(row: Row) -> Reading:
    """In bfloat16 forward takes as long at any width, and no less than in float32: its exponentials are in float32,
    as under autocast.
    """
    [(length, width, dtype)] = re.findall(r"seq (\d+), d (\d+), (fp32|bf16)", row["case"])
    parts = PARTS[row["metric"]]
    program = steps.causal_attention(int(width), int(length), DTYPES[dtype], parts[0])
    return Reading(program, H100, 1, "h100 causal attention", parts, steps.DO_BENCH)


def _data_parallel_h100(row: Row) -> Reading:
    """Communication alone, which does not depend on batch and context."""
    return Reading(steps.xl_on_ranks(row["case"], 2, 128), H100, 2, "h100 models", (row["metric"],))


def _ladder(row: Row) -> Reading:
    dtype = torch.bfloat16 if "bf16" in row["case"] else torch.float32
    sharded = row["case"] == "data_parallel"
    return Reading(steps.mlp_ladder(dtype, sharded=sharded), A100, 4 if sharded else 1, "a100 models", ("step",))


MODELS = "forward and backward|mixed precision|torch.compile of the model"
RULES: dict[str, Rules[Reading]] = {
    "cs336_a100": (
        (MODELS, _transformer_a100),
        ("attention", _attention_a100),
        ("all-reduce", _all_reduce_a100),
        ("data parallel", _data_parallel_a100),
    ),
    "cs336_stanford336": (
        (MODELS, _transformer_h100),
        ("attention", _attention_h100),
        ("flash attention", _causal_attention_h100),
        ("data parallel", _data_parallel_h100),
    ),
    "simple_pytorch": (("MLP", _ladder),),
    "odsc_fsdp": (),
}

UNKNOWN: tuple[Unknown, ...] = (
    ("", "", "", "1|bool", "no time"),
    ("", "", " std", "", "how far the single times are apart: shown beside their mean"),
    ("all-reduce", "", "bandwidth", "", "the bytes by the time of the row before"),
    (r"\(compiled\)", "", "", "", "compiled: its kernels are the compiler's"),
    ("", "compile", "", "", "compiled: its kernels are the compiler's"),
    ("", "", "compiled", "", "compiled: its kernels are the compiler's"),
    ("compile options|meta init", "", "", "", "compiled: its kernels are the compiler's"),
    ("", "", "triton", "", "measures its author's own kernel, which is not public"),
    ("inside self-attention", "", "", "", "of which model and context is not said"),
    ("all-reduce", "gloo", "", "", "gloo runs on the hosts' processors, of which nothing is known"),
    (
        "all-reduce",
        "nccl",
        "",
        "",
        "no all-reduce: 1 MB and 1000 MB take nearly the same, and 1 MB on 6 ranks takes 0.70 s, as processes take to "
        "start; over NVLink 1000 MB take about 10 ms",
    ),
    ("MLP ladder, seq 1024", "", "", "", "on GPUs that are not named"),
    ("data parallel.*H100", "", "step", "", "batch and context are not said"),
    ("optimizer state sharding", "", "", "", "batch and context are not said"),
    (
        "torch.compile of the model",
        "",
        "backward, eager",
        "",
        "of the largest model 0.464 s, where the first table has 0.193 s for the same pass: what else is in it is not "
        "said",
    ),
)


def reading_of(file: str, row: Row) -> Reading | None:
    """How the row is predicted; None if no prediction is held to it."""
    return None if why_unknown(row, UNKNOWN) else by_rule(row, RULES[file])


def rows(file: str) -> list[Row]:
    """The file's rows without those of memory."""
    return [row for row in rows_of(file) if row["unit"] not in ("MiB", "GiB", "GB", "bytes")]


@cache
def fitted_cases(file: str) -> frozenset[str]:
    """The half that rates are fitted to: configurations whose number has an even count of binary ones."""
    cases = dict.fromkeys(row["case"] for row in rows(file) if reading_of(file, row) is not None)
    return frozenset(case for number, case in enumerate(cases) if number.bit_count() % 2 == 0)


@cache
def repeated(file: str) -> frozenset[int]:
    """Indices of rows that repeat an earlier table: the same configuration and the same six digits or more."""
    seen, found = set(), set()
    for index, row in enumerate(rows(file)):
        figure = row["case"], row["metric"], row["value"], row["unit"]
        if len(row["value"].replace(".", "").lstrip("0")) >= 6 and figure in seen:
            found.add(index)
        seen.add(figure)
    return frozenset(found)


@cache
def compared(file: str) -> list[Compared]:
    """The file's rows that are predicted; a row that a later table repeats counts once."""
    found, again = [], repeated(file)
    for index, row in enumerate(rows(file)):
        reading = reading_of(file, row)
        if reading is None or index in again:
            continue
        predicted, least = predict(reading)
        seconds = float(row["value"]) * UNITS[row["unit"]]
        found.append(Compared(row, reading, seconds, predicted, least, row["case"] in fitted_cases(file)))
    return found


def predict(reading: Reading) -> tuple[float, float]:
    """The predicted seconds and the lower bound."""
    on = machine(reading)
    if reading.ranks > 1:
        step = simulated(replace(reading, parts=()))
        whole = set(reading.parts) >= set(step.parts)
        return sum(step.parts[part] for part in reading.parts), step.at_least if whole else 0.0
    rates, found = GPU(on), trace(reading.program, reading.on)
    takes = np.array([0.0 if cost is None else rates.seconds(cost) for cost in found.costs])
    host = on.reached.launch, on.reached.backward_launch
    parts, least = found.seconds_of_parts(takes, host, ahead_of(reading, on)), found.least_of_parts(rates)
    if any(part.of_host for part in found.parts):  # the host's clock says nothing about the device
        least = dict.fromkeys(least, 0.0)
    return sum(parts[part] for part in reading.parts), sum(least[part] for part in reading.parts)


def ahead_of(reading: Reading, on: Hardware) -> float:
    """Seconds by which the device begins after the host: it zeroes memory first."""
    return reading.zeroed / (on.bandwidth * on.reached.bandwidth)


@cache
def hosts() -> dict[str, dict[str, float]]:
    """Fitted seconds of each host to launch an operator."""
    return tomllib.loads(HOSTS.read_text(encoding="utf-8"))


def machine(reading: Reading) -> Hardware:
    """The device with the launch times of the row's host."""
    known = hardware(reading.on)
    return replace(known, reached=replace(known.reached, **hosts().get(reading.host, {})))


@cache
def simulated(reading: Reading) -> schedule.Step:
    """The step of one rank among others, by `Schedule`."""
    on = machine(reading)
    with simulation(reading.ranks, on=on) as timer:
        return timer.step(reading.program(timer), ahead_of(reading, on))

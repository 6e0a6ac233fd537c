"""What does attention cost, in time and in memory, by length, and how near to the hardware's limit does it come?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from impl.attention.accounting import work
from impl.attention.cases import MODES, AttentionCase
from impl.attention.workload import AttentionPass
from perf.published import beside
from shardmark.api import Grid, Implementation, Race, registry
from shardmark.plugin.measure import Measure
from shardmark.report.answers import goals, most
from shardmark.report.plots import Lines
from shardmark.rows.observers import PeakByLength
from shardmark.rows.row import Row
from shardmark.verdict.budget import MEMORY_SLACK

MEMORY = Grid(
    smoke=[AttentionCase(batch=2, seq=seq, head_dim=32, is_causal=False) for seq in (128, 256, 512)],
    laptop=[AttentionCase(batch=2, seq=seq, head_dim=64, is_causal=False) for seq in (256, 512, 1024, 2048)],
    paper=[AttentionCase(batch=8, seq=seq, head_dim=64, is_causal=False) for seq in (1024, 4096, 16384)],
    full=[
        AttentionCase(batch=8, seq=seq, head_dim=head_dim, is_causal=False)
        for head_dim in (16, 32, 64, 128)
        for seq in (256, 1024, 4096, 8192, 16384)
    ],
    full_rounds=100,
)

LENGTHS = Grid(
    smoke=[AttentionCase(batch=1, seq=256, head_dim=32, mode=mode) for mode in MODES],
    laptop=[
        *(AttentionCase(batch=1, seq=1024, head_dim=64, mode=mode) for mode in MODES),
        AttentionCase(batch=1, seq=4096, head_dim=64),
    ],
    paper=[
        *(AttentionCase(batch=1, seq=2**13, head_dim=64, mode=mode, dtype="bfloat16") for mode in MODES),
        AttentionCase(batch=1, seq=2**16, head_dim=64, dtype="bfloat16"),
    ],
    full=[
        AttentionCase(batch=1, seq=2**power, head_dim=head_dim, mode=mode, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for head_dim in (16, 32, 64, 128)
        for power in range(7, 17)
        for mode in MODES
    ],
)

HEADS = Grid(
    smoke=[AttentionCase(batch=1, heads=2, seq=256, head_dim=32, mode=mode) for mode in MODES[:2]],
    laptop=[AttentionCase(batch=1, heads=8, seq=1024, head_dim=64, mode=mode) for mode in MODES[:2]],
    paper=[AttentionCase(batch=4, heads=8, seq=16384, head_dim=128, mode=mode, dtype="bfloat16") for mode in MODES[:2]],
    full=[
        AttentionCase(batch=4, heads=8, seq=seq, head_dim=head_dim, mode=mode, dtype="bfloat16")
        for head_dim in (64, 128)
        for seq in (1024, 2048, 4096, 8192, 16384)
        for mode in MODES[:2]
    ],
)


pytestmark = pytest.mark.family("attention")


BY_LENGTH = Lines("Time by length", "case.seq", "stats.median", "s", "sequence length", "time", limit="limit.seconds")
MEMORY_BY_LENGTH = Lines(
    "Memory by length", "case.seq", "memory.tensors", "B", "sequence length", "tensors at the peak"
)
RATE_BY_LENGTH = Lines(
    "Rate by length, and the hardware's",
    "case.seq",
    "work.flops_per_second",
    "FLOP/s",
    "sequence length",
    "rate",
    panels="case.mode",
    limit="limit.peak_flops_per_second",
    limit_title="peak",
)


def _measure(measure: Measure, implementation: Implementation, case: AttentionCase, time: Race | None = None) -> Row:
    amount, longest = work(case), implementation.facts.longest
    if longest is not None and case.seq > longest:
        pytest.skip(f"{implementation} is timed up to {longest:,} tokens")
    return measure(
        AttentionPass,
        implementation,
        case,
        work=amount,
        slack=implementation.slack or MEMORY_SLACK,
        rates=lambda seconds: {"flops_per_second": amount.flops / seconds},
        time=time,
        observe=[PeakByLength()],
    )


@pytest.mark.question(
    "What does attention cost as the sequence grows?",
    short="attention, lengths",
    plots=[BY_LENGTH, MEMORY_BY_LENGTH, beside.ATTENTION],
)
@pytest.mark.cases(MEMORY)
def test_memory_by_length(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question(
    "What does causal attention cost, forward, backward and both?",
    short="causal attention",
    columns=["case", "implementation", "time ms", "TFLOP/s", "ratio to peer", "goal", "verdict"],
    plots=[replace(BY_LENGTH, panels="case.mode"), beside.FLASH_ATTENTION],
)
@pytest.mark.cases(LENGTHS)
def test_time_by_length(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question(
    "How near to the hardware's limit is attention with heads?",
    short="attention's limit",
    columns=["case", "implementation", "time ms", "TFLOP/s", "of roofline", "ratio to peer", "verdict"],
    answer=most(lambda entry: entry["extra_info"]["limit"]["fraction"], "{name} reaches {value:.0%} of the roofline"),
    plots=[RATE_BY_LENGTH],
)
@pytest.mark.cases(HEADS)
def test_throughput(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@dataclass(frozen=True)
class Goal:
    """`implementation` takes at most `ratio` times what `peer` takes for the case."""

    implementation: str
    peer: str
    ratio: float
    case: AttentionCase

    def __str__(self) -> str:
        return f"{self.implementation}-{self.peer}-{self.case}"


_HEADS = [case for case in HEADS.at("full") if case.seq >= 4096]
_FORWARD, _BACKWARD = ([case for case in _HEADS if case.mode == mode] for mode in ("forward", "backward"))

GOALS = Grid(
    smoke=[],
    laptop=[],
    paper=[
        *(Goal("flash_triton", "sdpa_cudnn", 1 / 0.9, case) for case in _FORWARD),
        *(Goal("flash_triton", "sdpa_flash", 1 / 1.3, case) for case in _FORWARD),
        *(Goal("flash_triton", "sdpa_cudnn", 1 / 0.8, case) for case in _BACKWARD),
        *(Goal("flash_triton", "sdpa_flash", 1 / 1.1, case) for case in _BACKWARD),
        *(Goal("flash_gluon", "sdpa_cudnn", 1 / 0.9, case) for case in _FORWARD),
        *(Goal("flash_gluon", "sdpa_flash", 1 / 1.3, case) for case in _FORWARD),
        *(Goal("flash_gluon", "sdpa_cudnn", 1 / 0.8, case) for case in _BACKWARD),
        *(Goal("flash_gluon", "sdpa_flash", 1 / 1.1, case) for case in _BACKWARD),
        *(Goal("flash_triton", "eager", 1 / 20, replace(case, mode="both")) for case in _FORWARD if case.seq == 16384),
        *(Goal("flash_triton", "flex", 1 / 2, replace(case, dtype="float32")) for case in _BACKWARD),
    ],
)


@pytest.mark.question(
    "Does attention reach its goals?",
    short="attention's goals",
    columns=["case", "implementation", "time ms", "TFLOP/s", "ratio to peer", "goal", "verdict"],
    answer=goals,
)
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("attention", case.implementation)
    if reason := implementation.unavailable_reason(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    row = _measure(measure, implementation, case.case, Race(case.peer, goal=case.ratio))
    if row["time"]["ratio"] is None:
        pytest.skip(f"not judged: {case.peer} does not run here")

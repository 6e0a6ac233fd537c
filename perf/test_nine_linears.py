"""What does FSDP save beside DDP? An MLP of nine square linears with bias and ReLU, plain SGD, a large batch.

Step by step the experiment of the FSDP tutorial at ODSC West 2024, whose figures are in `published/odsc_fsdp.csv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from impl.accounting.nine_linears import STRATEGIES, copying_peak, peak, stages, work
from impl.fsdp.cases import WRAPS, NineLinearsCase
from impl.fsdp.nine_linears_workload import SHARDED, NineLinearsStep
from perf.published import published
from shardmark.api import SCALES, Grid, Implementation, family
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.answers import saves
from shardmark.report.plots import Points
from shardmark.rows.observers import Stages

PREDICTED = tuple(name for name, each in family("fsdp").implementations.items() if each.memory is None)
"""PyTorch's own, and what applies them; DDP is one of another family."""

CASES = Grid(
    smoke=[NineLinearsCase(64, batch=32)],
    laptop=[NineLinearsCase(384, batch=192)],
    paper=[NineLinearsCase(16_384, batch=8_192)],
)


def _changed(change: Callable[[NineLinearsCase], list[NineLinearsCase]]) -> Grid:
    """The same cases at each scale, changed."""
    return Grid(*([changed for case in CASES.at(scale) for changed in change(case)] for scale in SCALES))


WRAPPED = _changed(lambda case: [replace(case, wrap=wrap) for wrap in WRAPS[1:]])
OFFLOADED = _changed(lambda case: [replace(case, offload=True)])


pytestmark = [
    pytest.mark.question(
        "What does FSDP save beside DDP?",
        short="FSDP beside DDP",
        columns=["case", "implementation", "time ms", "to send MiB", "tensors MiB", "budget MiB", "verdict"],
        answer=saves("ddp"),
        plots=[
            Points(
                "Peak memory, ours and as published",
                ours={"peak memory": "memory.peak"},
                units={"peak memory": "B"},
                published=published("odsc_fsdp", "MLP of 8 linears"),
            )
        ],
    ),
    pytest.mark.benchmark(min_rounds=7, max_time=0.2),
]


@pytest.mark.family("data_parallel", only=("ddp",))
@pytest.mark.cases(CASES)
def test_ddp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    _measure(measure, implementation, case, world)


@pytest.mark.family("fsdp", only=(*STRATEGIES, *PREDICTED))
@pytest.mark.cases(CASES)
def test_fsdp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    """With a unit for each linear."""
    _measure(measure, implementation, case, world)


@pytest.mark.family("fsdp", option="wrap", only=SHARDED)
@pytest.mark.cases(WRAPPED)
def test_wrapping(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    """With more in a unit."""
    _measure(measure, implementation, case, world)


@pytest.mark.family("fsdp", option="cpu_offload", only=SHARDED)
@pytest.mark.cases(OFFLOADED)
def test_offload(
    implementation: Implementation, case: NineLinearsCase, world: World, device: str, measure: Measure
) -> None:
    """Of what a rank keeps."""
    if device == "cpu":
        pytest.skip("on a CPU there is nowhere to offload to")
    _measure(measure, implementation, case, world)


def _measure(measure: Measure, implementation: Implementation, case: NineLinearsCase, world: World) -> None:
    """Against this question's own formula, a library's against its prediction, a user's own against the formula of what
    is not sharded: to save is its use.
    """
    if world.size == 1:
        pytest.skip("one rank has nothing to shard: --ranks 2")
    case = replace(case, ranks=world.size)
    name = implementation.name
    known = name in STRATEGIES
    formula = partial(peak, name=name) if known else None if name in ("ddp", *PREDICTED) else copying_peak
    kept = implementation.family != "fsdp" or implementation.name.endswith("kept") or case.wrap == "whole"
    # By itself the first linear is not gathered again: its input needs no gradient.
    again = 0 if kept else case.linears - (implementation.name == "simple")
    measure(
        NineLinearsStep,
        # Formulas and peers that come with implementations are of the language model; the table compares these.
        replace(implementation, memory=formula, time=None),
        case,
        world_size=world.size,
        work=work(case, gathered_again=again),
        slack=1.02,
        observe=[Stages(stages(case, name) if known else {})],
    )

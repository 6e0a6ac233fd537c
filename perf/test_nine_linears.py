"""What does FSDP save beside DDP? An MLP of nine square linears with bias and ReLU, plain SGD, a large batch.

Step by step the experiment of the FSDP tutorial at ODSC West 2024, whose figures are in `published/odsc_fsdp.csv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from impl.fsdp.cases import WRAPS, NineLinearsCase
from impl.fsdp.contract import Facts
from impl.fsdp.nine_linears_accounting import copying_peak, work
from impl.fsdp.nine_linears_workload import NineLinearsStep
from perf.published import published
from shardmark.api import SCALES, Grid, Implementation, family
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.answers import saves
from shardmark.report.plots import MEMORY, Points
from shardmark.rows.observers import Stages

KNOWN = tuple(
    name for name, each in family("fsdp").implementations.items() if each.memory is None or each.facts.nine_linears
)
"""Ways to shard whose bytes are known here: by a prediction, as PyTorch's own, or by a closed form."""
SHARDED = ("sharded", "fsdp1", "fsdp2")
"""Ways to shard that are also measured with other options."""

CASES = Grid(
    smoke=[NineLinearsCase(64, batch=32)],
    laptop=[NineLinearsCase(384, batch=192)],
    paper=[NineLinearsCase(16_384, batch=8_192)],
)


def _changed(change: Callable[[NineLinearsCase], list[NineLinearsCase]]) -> Grid:
    """`CASES` at each scale, each replaced by what `change` makes of it."""
    return Grid(*([changed for case in CASES.at(scale) for changed in change(case)] for scale in SCALES))


WRAPPED = _changed(lambda case: [replace(case, wrap=wrap) for wrap in WRAPS[1:]])


pytestmark = [
    pytest.mark.question(
        "What does FSDP save beside DDP?",
        short="FSDP beside DDP",
        columns=["case", "implementation", "time ms", "to send MiB", "tensors MiB", "budget MiB", "verdict"],
        answer=saves("ddp"),
        plots=[
            MEMORY,
            Points(
                "Peak memory, ours and as published",
                ours={"peak memory": "memory.peak"},
                units={"peak memory": "B"},
                published=published("odsc_fsdp", "MLP of 8 linears"),
            ),
        ],
    ),
    pytest.mark.benchmark(min_rounds=7, max_time=0.2),
]


@pytest.mark.family("data_parallel", only=("ddp",))
@pytest.mark.cases(CASES)
def test_ddp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    _measure(measure, implementation, case, world)


@pytest.mark.family("fsdp", only=KNOWN)
@pytest.mark.cases(CASES)
def test_fsdp(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    """Each linear is a unit."""
    _measure(measure, implementation, case, world)


@pytest.mark.family("fsdp", option="wrap", only=SHARDED)
@pytest.mark.cases(WRAPPED)
def test_wrapping(implementation: Implementation, case: NineLinearsCase, world: World, measure: Measure) -> None:
    """Units of several linears."""
    _measure(measure, implementation, case, world)


def _measure(measure: Measure, implementation: Implementation, case: NineLinearsCase, world: World) -> None:
    """Hold a technique to its closed form for this model, and a library's to its prediction.

    A user's own is held to the formula of an unsharded step: it should save something.
    """
    if world.size == 1:
        pytest.skip("one rank has nothing to shard: --ranks 2")
    case = replace(case, ranks=world.size)
    facts = implementation.facts or Facts(reshard_after_forward=False)  # DDP's parameters are all there
    formulas = facts.nine_linears
    formula = formulas.peak if formulas else None if implementation.memory is None else copying_peak
    resharded = facts.reshard_after_forward and case.wrap != "whole"
    again = case.linears - (not facts.gathers_first_again) if resharded else 0
    measure(
        NineLinearsStep,
        # Formulas and peers that come with implementations are of the language model; the table compares these.
        replace(implementation, memory=formula, time=None),
        case,
        world_size=world.size,
        work=work(case, gathered_again=again),
        slack=1.02,
        observe=[Stages(formulas.stages(case) if formulas else {})],
    )

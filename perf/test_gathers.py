"""Do FSDP's all-gathers end before the computation wants them?

A unit's all-gather may start while the unit before it computes. The rest is exposed: the computation waits.

    pytest perf/test_gathers.py --scale paper --simulate h100-80gb:8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from impl.fsdp.accounting import work
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStepByBackend
from shardmark.api import Grid, Implementation
from shardmark.meter.plan import Rounds
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.ranking import largest_case
from shardmark.report.words import called, sentence, where
from shardmark.rows.columns import Entry
from shardmark.rows.observers import Gathers
from shardmark.text import ms

CASES = Grid(
    smoke=[FSDPCase("tiny", batch=2, context=32)],
    laptop=[FSDPCase("mini", batch=2, context=64)],
    paper=[FSDPCase("2.7b", batch=1, context=context, dtype="bfloat16") for context in (512, 2048)],
)


def answer(entries: Sequence[Entry]) -> str | None:
    """How many all-gathers of each implementation end in time, and how long the step waits for the others."""
    case, said = largest_case(entries), []
    for entry in case:
        if found := entry["extra_info"]["time"].get("gathers"):
            in_time = sum(each["in_time"] > 0.5 for each in found)
            waits = ms(sum(each["exposed"] for each in found))
            said.append(f"{called(entry)} has {in_time} of {len(found)} in time, and waits {waits} ms in all")
    return sentence(where(case[0], entries), "; ".join(said)) if said else None


@pytest.mark.family("fsdp", only=("sharded_plain", "sharded", "fsdp2"))
@pytest.mark.question(
    "Do FSDP's all-gathers end in time?",
    short="all-gathers in time",
    columns=["case", "implementation", "time ms", "gathers in time", "waits ms", "verdict"],
    answer=answer,
)
@pytest.mark.cases(CASES)
def test_gathers(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    if world.size == 1:
        pytest.skip("one rank gathers nothing: --ranks 2")
    case = replace(case, ranks=world.size)
    facts = implementation.facts
    measure(
        FSDPStepByBackend,
        replace(implementation, memory=None, time=None),  # its formula is of other collectives
        case,
        world_size=world.size,
        work=work(case, kept=not facts.reshard_after_forward, norms_replicated=facts.norms_replicated),
        rounds=Rounds(minimum=1, max_seconds=0.1),
        observe=[Gathers()],
    )

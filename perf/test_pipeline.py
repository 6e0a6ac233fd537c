"""How long do a pipeline's ranks wait, by schedule and micro-batches?

Ranks sleep in place of computing, so that a machine with fewer cores than ranks shows it. The bubble is the share of a
step for which a rank does not compute; messages, and the time at which a sleeper is woken, are in what is measured.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.pipeline.cases import CASES, SleepingCase
from impl.pipeline.contract import Facts
from perf.sleeping_stages import SleepingStep, computing_seconds
from shardmark.api import Implementation, Mesh, Work
from shardmark.plugin.measure import Measure
from shardmark.report.answers import fastest
from shardmark.rows.columns import Column

MEASURED = Column("bubble", lambda entry, row: f"{share:.3f}" if (share := row["work"].get("bubble")) else None)
FORMULA = Column(
    "by formula", lambda entry, row: f"{share:.3f}" if (share := row["work"].get("bubble_by_formula")) else None
)


@pytest.mark.question(
    "How long do a pipeline's ranks wait?",
    short="bubbles",
    columns=["case", "implementation", "time ms", MEASURED, FORMULA],
    answer=fastest,
)
@pytest.mark.family("pipeline")
@pytest.mark.cases(CASES)
@pytest.mark.meshes("pp=4")
def test_bubble(implementation: Implementation, case: SleepingCase, mesh: Mesh, measure: Measure) -> None:
    case, facts = replace(case, ranks=mesh.size), implementation.facts
    known = facts.bubble if isinstance(facts, Facts) else None
    formula = None if known is None else known(case.ranks, case.micro_batches)
    measure(
        SleepingStep,
        implementation,
        case,
        world_size=mesh.size,
        work=Work(),
        rates=lambda seconds: {"bubble": 1 - computing_seconds(case) / seconds, "bubble_by_formula": formula},
    )

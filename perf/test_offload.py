"""What does offloading shards to the host's memory cost: its bytes there, pinned or not, and the time of copies?

Shards of parameters, their gradients and the optimizer's state are in the host's memory, and the host updates them. On
a CPU there is nowhere to offload to; `--simulate` predicts for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from impl.fsdp.accounting import work
from impl.fsdp.cases import CASES, FSDPCase
from impl.fsdp.workload import OffloadStep
from shardmark.api import SCALES, Grid, Implementation
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.words import called, milliseconds, sentence, size, where
from shardmark.rows.columns import Column, Entry
from shardmark.text import mib, ms

OFFLOADED = Grid(
    *([replace(case, offload=offload) for case in CASES.at(scale) for offload in (False, True)] for scale in SCALES)
)

HOST = Column("host MiB", lambda entry, row: mib(row["memory"]["host"]) if "host" in row["memory"] else None)
PINNED = Column("pinned MiB", lambda entry, row: mib(row["memory"]["pinned"]) if "pinned" in row["memory"] else None)
COPIES = Column("copies ms", lambda entry, row: ms(row["time"]["copies"]) if "copies" in row["time"] else None)


def price(entries: Sequence[Entry]) -> str | None:
    """The last offloaded case beside the same one without offload."""
    by_test = {entry["name"]: entry for entry in entries}
    for name, entry in reversed(by_test.items()):
        beside, row = by_test.get(name.replace("-offload", "")), entry["extra_info"]
        if "host" in row["memory"] and beside is not None and entry["stats"] and beside["stats"]:
            held, before = (size(each["extra_info"]["memory"]["tensors"]) for each in (entry, beside))
            said = (
                f"{called(entry)} holds {held} on each device in place of {before}, and "
                f"{size(row['memory']['host'])} in the host's memory, where pinned blocks take "
                f"{size(row['memory']['pinned'])}; a step takes "
                f"{milliseconds(entry['stats']['median'])} in place of {milliseconds(beside['stats']['median'])}"
            )
            return sentence(where(entry, entries), said)
    return None


@pytest.mark.family("fsdp", option="cpu_offload", only=("sharded", "fsdp2"))
@pytest.mark.question(
    "What does offloading cost on the host?",
    short="offload",
    columns=["case", "implementation", "time ms", "tensors MiB", HOST, PINNED, COPIES],
    answer=price,
)
@pytest.mark.cases(OFFLOADED)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: FSDPCase, world: World, measure: Measure) -> None:
    case = replace(case, ranks=world.size)
    measure(
        OffloadStep,
        replace(implementation, time=None),  # each is beside itself without offload
        case,
        world_size=world.size,
        work=work(case),
        slack=1.02,
    )

"""A wait for communication counts as exposed communication in every implementation, wherever it is."""

from typing import Any

import pytest

from correctness.support.communication import delayed, recorded
from correctness.support.metering import plan_of
from impl.data_parallel.cases import CASES
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.cases import FSDPCase
from impl.fsdp.link_workload import FSDPOnLink
from impl.fsdp.workload import FSDPStep
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from shardmark.api import Implementation, family, resolve
from shardmark.meter.measure_case import timed_step, warmed_up
from shardmark.meter.memory import Memory
from shardmark.meter.plan import COMPUTE, IMPLEMENTATION, Measured, Plan
from shardmark.plugin import WorldsBySize
from shardmark.rows.fill import time_entry
from shardmark.rows.observers import ExposedCommunication
from tests.support.measured import row_by

DELAYED = 0.4
"""Seconds of all delays of a step: beside other processes a step of some ms may take tens of them."""

OPTIONS: dict[str, Any] = {"batch": 2, "context": 32}
STEPS: dict[str, tuple[type[Any], Any]] = {
    "data_parallel": (DataParallelStep, CASES.smoke[0]),
    "sharded_optimizer": (ShardedStep, ShardedStepCase("tiny", **OPTIONS)),
    "fsdp": (FSDPOnLink, FSDPCase("tiny", **OPTIONS)),
}
NAMES = [
    ("data_parallel", "naive"),
    ("data_parallel", "bucketed"),
    ("data_parallel", "ddp"),
    ("sharded_optimizer", "zero_redundancy"),
    ("sharded_optimizer", "sharded"),
    ("fsdp", "sharded"),
    ("fsdp", "fsdp2"),
]


def messages(plan: Plan) -> list[str]:
    """The collectives and messages that this rank starts in a step."""
    workload = warmed_up(plan)
    workload.prepare()
    with recorded() as found:
        workload.step(lambda part: None)
    return [each.name for each in found if each.name != "receive"]


def laps_delayed(plan: Plan) -> Measured:
    """Laps of a step whose collectives all start late, and of its compute."""
    count, workload = len(messages(plan)), warmed_up(plan)
    timed_step(plan, workload, workload.compute_step)  # which makes a model in its first call
    with delayed(before=DELAYED / count):
        laps = timed_step(plan, workload, workload.step)
    alone = timed_step(plan, workload, workload.compute_step)
    return Measured("gloo", Memory(), {IMPLEMENTATION: [laps], COMPUTE: [alone]})


@pytest.mark.parametrize(("of", "name"), NAMES, ids=str)
def test_a_delay_of_each_collective_is_exposed_communication(of: str, name: str, worlds: WorldsBySize) -> None:
    """PyTorch's DDP and FSDP wait inside forward and backward, its ZeRO inside the optimizer's step."""
    workload, case = STEPS[of]
    plan = plan_of(workload, resolve(of, name), case, ranks=2)
    parts = row_by(ExposedCommunication(), worlds(2).run(laps_delayed, plan))["time"]["parts"]
    assert parts["communication"] > 0.75 * DELAYED
    assert max(parts[part] for part in ("forward", "backward", "optimizer")) < DELAYED / 2


@pytest.mark.parametrize("name", ["sharded", "fsdp2"])
def test_without_such_a_measurement_no_part_is_called_communication(name: str, worlds: WorldsBySize) -> None:
    plan = plan_of(FSDPStep, resolve("fsdp", name), STEPS["fsdp"][1], ranks=2)
    time, _ = time_entry(worlds(2).run(laps_of_a_step, plan), None)
    assert set(time["parts"]) == {"forward", "backward", "optimizer"}


def laps_of_a_step(plan: Plan) -> Measured:
    workload = warmed_up(plan)
    return Measured("gloo", Memory(), {IMPLEMENTATION: [timed_step(plan, workload, workload.step)]})


def _with_a_budget() -> list[tuple[str, Implementation]]:
    return [
        (of, each)
        for of in STEPS
        for each in family(of).implementations.values()
        if each.time is not None and each.time.budget is not None
    ]


@pytest.mark.parametrize(("of", "implementation"), _with_a_budget(), ids=str)
def test_a_budget_of_ranks_leaves_room_for_what_their_messages_cost(
    of: str, implementation: Implementation, worlds: WorldsBySize
) -> None:
    """Where the cost of a message is all of a step's time, as beside a neighbour, the ratio is that of the messages."""
    workload, case = STEPS[of]
    race = implementation.time
    assert race is not None and race.budget is not None
    mine, peers = (
        len(worlds(2).run(messages, plan_of(workload, each, case, ranks=2))[0])
        for each in (implementation, resolve(of, race.peer))
    )
    assert mine <= race.budget * peers, f"{mine} messages, {race.peer} {peers}"

"""Measure a workload without the `measure` fixture: plans, rows, and a case metered on ranks against its formulas."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from shardmark.api import Implementation, Workload, resolve
from shardmark.meter.measure_case import meter_pass
from shardmark.meter.memory import Memory, meter
from shardmark.meter.plan import Plan
from shardmark.ranks.world import World

PASSES = 10
"""Most metered passes; the smallest figure counts, as a backend's thread may free memory late."""
UNSEEN = 1e-3
"""Allowed excess, as a share: small tensors with which ranks describe their modules to one another."""


def plan_of(
    workload: type[Workload],
    implementation: Implementation | None = None,
    case: Any = None,
    ranks: int = 1,
    *,
    peer: Implementation | None = None,
    device: str = "cpu",
    **options: Any,
) -> Plan:
    """A plan with the `options` of `Plan`.

    Without an implementation it has a registered one, which ranks can find by its name; the workload need not use it.
    """
    return Plan(workload, implementation or resolve("training_step", "eager"), peer, case, device, ranks, **options)


def device_of_rank() -> str:
    """Device of this rank's tensors: CUDA under NCCL, else the CPU."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def metered(workload: type[Workload], implementation: Implementation, case: Any, ranks: int = 2) -> Memory:
    """Meter the case on this rank, without timing; every rank must call it."""
    _, memory, _ = meter_pass(plan_of(workload, implementation, case, ranks, device=device_of_rank()))
    return memory


def peak_of_a_step(workload: type[Workload], implementation: Implementation, case: Any) -> int:
    """Meter this rank's tensors at the peak of the second step, which later steps repeat; every rank must call it."""
    device = device_of_rank()
    with meter(device) as memory:
        step = workload(implementation, case, device)
        for _ in range(2):
            step.prepare()
            memory.reset_peak()
            step.step(lambda part: None)
    return memory.tensors


def assert_metered(
    world: World,
    expected: Sequence[dict[str, int]],
    function: Callable[..., dict[str, int]],
    *args: Any,
    below: float = 0.0,
) -> None:
    """Assert that `function(*args)` returns on each rank the figures in `expected`, within UNSEEN. If a formula is
    for the rank that holds most, other ranks may be lower by the share `below`."""
    least = world.run(function, *args)
    for _ in range(PASSES - 1):
        if not _beyond(least, expected, below):
            break
        for old, new in zip(least, world.run(function, *args), strict=True):
            old.update({name: min(value, new[name]) for name, value in old.items()})
    beyond = _beyond(least, expected, below)
    assert not beyond, "; ".join(beyond)


def _beyond(found: Sequence[dict[str, int]], expected: Sequence[dict[str, int]], below: float) -> list[str]:
    beyond = [
        f"{name} on rank {rank}: {found[rank][name]:,} bytes against {value:,}"
        for rank, figures in enumerate(expected)
        for name, value in figures.items()
        if not (1 - below) * value <= found[rank][name] <= (1 + UNSEEN) * value
    ]
    for name in expected[0]:  # whatever the other ranks hold, one must hold the expected bytes
        most, formula = (max(figures[name] for figures in ranks) for ranks in (found, expected))
        if most < (1 - UNSEEN) * formula:
            beyond.append(f"{name} on the rank with most: {most:,} bytes against {formula:,}")
    return beyond

"""Parts of a row, made from the ranks' measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from statistics import fmean, median
from typing import Any, TypeVar, cast

from shardmark.api.registry import Race
from shardmark.api.work import Work
from shardmark.meter.disturbances import NOTED, THROTTLED, disturbances
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, PEER, Identity, Measured
from shardmark.meter.roofline import Roofline
from shardmark.rows.row import SCHEMA, Counters, Gpu, Limit, Row, Time
from shardmark.rows.row import Memory as MemoryPart
from shardmark.verdict.betting import SHOWN_CONFIDENCE, Interval, interval, paired_ratios
from shardmark.verdict.budget import WORTH, MemoryBudget

Part = TypeVar("Part")

NO_RACE: Time = {"peer": None, "ratio": None, "interval": None, "budget": None, "goal": None, "outcome": None}
"""Part of a row's `time` where there is no peer."""

PARTS = {"operators_by_name": "operators", "bytecodes_by_function": "bytecodes"}
"""Counters that are dicts, with the counter whose number they add up to."""


def part_of(kind: type[Part], value: Any) -> Part:
    """Those fields of the dataclass `value` that `kind`, a part of a row, has; others stay out of the file."""
    return cast(Part, {name: held for name, held in asdict(value).items() if name in kind.__annotations__})


def new_row(identity: Identity, scale: str, link: str | None) -> Row:
    """A row without measurements; `link` is the rate of the link between the ranks."""
    case = asdict(identity.case) if is_dataclass(identity.case) and not isinstance(identity.case, type) else {}
    if words := getattr(identity.case, "words", ""):
        case["words"] = words
    row: Row = {
        "schema": SCHEMA,
        "family": identity.family,
        "implementation": identity.implementation,
        "case": {"id": str(identity.case), **case},
        "device": identity.device,
        "backend": identity.backend,
        "world_size": identity.world_size,
        "link": link,
        "dtype": case.get("dtype"),
        "scale": scale,
        "simulated": False,
        "hardware": None,
        "memory": {},
        "time": {},
        "work": {},
        "limit": {},
        "counters": {},
        "verdict": None,
        "why": None,
    }
    if identity.called:
        row["called"] = identity.called
    return row


def step_seconds(ranks: Sequence[Measured], name: str = IMPLEMENTATION) -> list[float]:
    """Each round's time: the slowest rank's."""
    return [max(laps.seconds for laps in round_) for round_ in zip(*(rank.laps[name] for rank in ranks), strict=True)]


def largest_memory(ranks: Sequence[Measured]) -> Memory:
    """The memory of the rank that held most."""
    return max((rank.memory for rank in ranks), key=lambda memory: (memory.tensors, memory.peak))


def memory_entry(ranks: Sequence[Measured], budget: MemoryBudget | None) -> MemoryPart:
    """Bytes by phase and at the peak, on the rank that held most, beside the budget of its tensors if there is one."""
    most = largest_memory(ranks)
    of_cuda: MemoryPart = {"allocated": most.allocated, "reserved": most.reserved} if most.reserved else {}
    if most.host:
        of_cuda |= {"host": most.host, "pinned": most.pinned}
    return {
        "phases": most.phases,
        "peak": most.peak,
        "tensors": most.tensors,
        "workspace": most.workspace.nbytes,
        "workspace_operator": most.workspace.operator or None,
        "peak_by_rank": [rank.memory.peak for rank in ranks],
        "tensors_by_rank": [rank.memory.tensors for rank in ranks],
        **budget_entry(budget),
        **of_cuda,
    }


def budget_entry(budget: MemoryBudget | None) -> MemoryPart:
    """The part of the row's "memory" that is known before anything is measured."""
    if budget is None:
        return {}
    return {**part_of(MemoryPart, budget), "budget": budget.bytes}


def time_entry(
    ranks: Sequence[Measured],
    race: Race | None,
    confidence: float = SHOWN_CONFIDENCE,
    ratios: Sequence[float] | None = None,
) -> tuple[Time, Interval | None]:
    """The row's "time", and the ratio's interval with `confidence`, which decides a budget.

    The row has times by part and by rank, and if there is a peer, the ratio to it with the 95% interval that decides a
    goal, and the one that decides a budget. `ratios` are those of an earlier row that timed the same pair.
    """
    entry: Time = {
        "parts": without_communication(part_seconds(ranks)),
        "median_by_rank": [median(laps.seconds for laps in rank.laps[IMPLEMENTATION]) for rank in ranks],
        "host": max((rank.host for rank in ranks if rank.host is not None), default=None),
        **NO_RACE,
        "machine": disturbances(
            step_seconds(ranks),
            step_seconds(ranks, PEER) if PEER in ranks[0].laps else [],
            max((rank.waited for rank in ranks), default=0.0),
        )
        | throttled(ranks),
    }
    if race is not None and ratios is None and PEER in ranks[0].laps:
        ratios = paired_ratios(step_seconds(ranks), step_seconds(ranks, PEER))
    if race is None or ratios is None:  # no peer, or no room or device for it
        return entry, None
    shown, judged = interval(ratios), interval(ratios, confidence)
    entry |= {
        "peer": race.peer,
        "peer_median": median(step_seconds(ranks)) / shown.center,
        "ratio": shown.center,
        "interval": shown.ends,
        "budget": race.budget,
        "judged_interval": judged.ends,
        "judged_confidence": confidence,
        "goal": race.goal,
        "outcome": None if race.goal is None else shown.outcome(race.goal * (1 + WORTH)),
    }
    return entry, judged


def gpus_entry(ranks: Sequence[Measured]) -> list[Gpu]:
    """Each rank's GPU; empty unless NVML knows all of them."""
    figures = [rank.gpu for rank in ranks if rank.gpu is not None]
    return [part_of(Gpu, each) for each in figures] if len(figures) == len(ranks) else []


def throttled(ranks: Sequence[Measured]) -> dict[str, float]:
    """Disturbances of the rank whose GPU's clocks were lowered longest, by cause."""
    shares = {
        name: max((rank.gpu.throttled.get(name, 0.0) for rank in ranks if rank.gpu is not None), default=0.0)
        for name in THROTTLED
    }
    return {name: share for name, share in shares.items() if share >= NOTED}


def counters_entry(ranks: Sequence[Measured]) -> Counters:
    """The first rank's collectives, and the largest rank's other counters; empty if some rank counted nothing.

    A number's parts are of the rank with the largest number.
    """
    counted = [asdict(rank.counters) for rank in ranks if rank.counters is not None]
    if len(counted) < len(ranks):
        return {}
    entry: dict[str, Any] = {"collectives": [list(each) for each in counted[0].pop("collectives")]}
    for name in counted[0]:
        values = [each[name] for each in counted]
        if name in PARTS:
            most = max(counted, key=lambda each: each[PARTS[name]] or 0)
            entry[name] = None if None in values else most[name]
        else:
            entry[name] = None if None in values else max(values)
    return cast(Counters, entry)


def limit_entry(work: Work, roofline: Roofline, devices: int, seconds: float) -> Limit:
    """The roofline's seconds for this work on `devices` devices, their fraction of the step's `seconds`, and MFU."""
    limit = roofline.seconds(work) / devices
    share = limit / seconds if seconds else None
    entry: Limit = {"seconds": limit, "fraction": share, **part_of(Limit, roofline)}
    if work.model_flops and seconds:
        entry["mfu"] = work.model_flops / (seconds * devices * roofline.peak_flops_per_second)
    return entry


def without_communication(parts: dict[str, float]) -> dict[str, float]:
    """The parts of a step by its own marks, with the wait at the end of backward as a part of backward.

    Some implementations wait for communication there, others (PyTorch's DDP and FSDP) inside forward and backward. So
    the mark alone is no measure of communication: `shardmark.rows.observers.ExposedCommunication` takes one.
    """
    if not {"backward", "communication"} <= parts.keys():
        return parts
    rest = {part: seconds for part, seconds in parts.items() if part != "communication"}
    return rest | {"backward": parts["backward"] + parts["communication"]}


def part_seconds(ranks: Sequence[Measured], name: str = IMPLEMENTATION) -> dict[str, float]:
    """Seconds of each part of the steps called `name`: its mean share over rounds and ranks, times the median step."""
    laps, step = [lap for rank in ranks for lap in rank.laps[name]], median(step_seconds(ranks, name))
    return {part: step * fmean(lap.parts[part] / (lap.seconds or 1.0) for lap in laps) for part in laps[0].parts}

"""What else may be seen of a case, beside its step time and its peak memory: a test asks for it with `observe`.

    measure(Step, implementation, case, work=work, observe=[Timeline(activations=formulas), Compile()])

An observer owns what runs on each rank, its part of the row, and its lines under the question's table. A question's own
observer is a subclass of `Observer`; the suite's are in `perf/observers/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch.distributed as dist

from shardmark import timeline
from shardmark.budget import SHOWN_CONFIDENCE, fewest_rounds, median_interval, tolerated
from shardmark.cold import cold_compiler, has_compiled
from shardmark.kernels import StepProfile
from shardmark.memory import Meter, release
from shardmark.passes import WARMUPS, warmed_up
from shardmark.plan import COMMUNICATION, COMPUTE, IMPLEMENTATION, Measured, Plan, Workload
from shardmark.report.fits import peaks_by_length
from shardmark.report.kernels import kernel_lines
from shardmark.report.memory import memory_lines, stage_lines
from shardmark.rows import Row, largest_memory, mean_parts, step_seconds
from shardmark.trace import memory_snapshot, module_ranges, modules_of, profile_step

Entry = dict[str, Any]


class Observer:
    """One thing to see. Class methods run on the ranks, to which only the class travels; the others where pytest runs.

    `needs` names methods that the workload must have; `timed` those of them that are timed, by name, in the same
    rounds as the step; `min_rounds` is how many of these it takes.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    timed: ClassVar[Mapping[str, str]] = {}
    min_rounds: int = 1

    def check(self, workload: type[Workload]) -> None:
        """Raises TypeError, in one line, where the workload lacks what this observer needs."""
        __tracebackhide__ = True
        for method in self.needs:
            if not callable(getattr(workload, method, None)):
                raise TypeError(f"{type(self).__name__} needs {workload.__name__}.{method}(), which is not defined")

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[Any]:
        """What all of the measuring happens in."""
        return nullcontext()

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Called in the metered pass, when the workload is made and prepared."""

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> Any:
        """The observer's own pass, after the timed rounds; what it returns becomes `measured.observed[cls]`."""

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """Write the observer's part of the row, when all else but the verdict is there."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Lines under the table of a question, from all of its rows."""
        return iter(())


class Profile(Observer):
    """Where time goes: one more step under the profiler, and what `kernels` makes of the first rank's profile.

    With --trace-dir it writes each rank's Chrome trace, and on CUDA its memory snapshot.
    """

    def __init__(self, kernels: Callable[[StepProfile], Row] | None = None) -> None:
        self.kernels = kernels

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> tuple[StepProfile, list[Path]]:
        """From nothing and when all else is done, so that it touches no other figure."""
        release(plan.device)
        if plan.trace is None:
            return profile_step(warmed_up(plan), plan.device), []
        rank = f".rank{dist.get_rank()}" if plan.world_size > 1 else ""
        chrome, snapshot = (plan.trace.with_name(f"{plan.trace.name}{rank}.{end}") for end in ("json", "pickle"))
        with memory_snapshot(snapshot, plan.device) as snapshots:
            workload = warmed_up(plan)
        return profile_step(workload, plan.device, trace=chrome), [chrome, *snapshots]

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """The row's "kernels", and "trace": the names of all ranks' files."""
        observed = [rank.observed[type(self)] for rank in ranks]
        if self.kernels is not None:
            row["kernels"] = self.kernels(observed[0][0])
        if files := [file.name for _, files in observed for file in files]:
            row["trace"] = files

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Kernels by phase, and each category's share."""
        for entry in entries:
            yield from kernel_lines(entry)


class Timeline(Observer):
    """Where memory goes: every byte of one step on the first rank by kind, module and operator.

    `activations`, bytes by module and operator, stand beside what forward keeps for backward. The workload's `kinds()`
    gives its live tensors as "parameters", "gradients" and "optimizer state".
    """

    needs = ("kinds",)

    def __init__(self, activations: Mapping[tuple[str, str], int] | None = None) -> None:
        self.activations = activations or {}

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> timeline.Timeline | None:
        """Record the first rank; the others run the same steps, as these communicate."""
        if plan.world_size == 1 or dist.get_rank() == 0:
            return timeline_pass(plan)
        release(plan.device)
        warmed_up(plan, WARMUPS + 1)
        return None

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's "memory": "kinds" at each phase, the "curve", "activations", and the "largest" blocks."""
        row["memory"] |= timeline_entry(ranks[0].observed[type(self)], self.activations)

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """For each row three tables, in MiB."""
        return memory_lines(entries)


def timeline_pass(plan: Plan) -> timeline.Timeline:
    """What each byte of one step is, and who allocated it."""
    release(plan.device)
    with timeline.timeline(plan.device) as recording:
        workload = warmed_up(plan)
        workload.prepare()
        with module_ranges(modules_of(workload)):
            recording.mark(timeline.BEFORE, workload.kinds())
            workload.step(lambda part: recording.mark(f"after_{part}", workload.kinds()))
    return recording.read()


def timeline_entry(found: timeline.Timeline, expected: Mapping[tuple[str, str], int]) -> Row:
    """What is kept for backward stands beside the formula `expected` of each module and operator."""
    kept = timeline.by_layer_and_operator(found.activations)
    return {
        "kinds": found.phases,
        "curve": found.curve,
        "activations": [
            {"module": module, "operator": operator, "bytes": kept.get(where, 0), "formula": expected.get(where)}
            for where in {**kept, **expected}
            for module, operator in [where]
        ],
        "largest": [asdict(block) for block in found.largest],
    }


class Stages(Observer):
    """What is held after each stage of making the workload, as it reports them (`shardmark.memory.stage`).

    `formulas` are the bytes that should be live after each.
    """

    def __init__(self, formulas: Mapping[str, int]) -> None:
        self.formulas = formulas

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's "memory": "stages", each on the rank that holds most then."""
        if not ranks[0].memory.stages:
            raise TypeError(f"Stages: {row['implementation']} was made without a call of shardmark.memory.stage")
        row["memory"]["stages"] = {
            name: asdict(max((rank.memory.stages[name] for rank in ranks), key=lambda stage: stage.live))
            | {"formula": self.formulas.get(name)}
            for name in ranks[0].memory.stages
        }

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """One table with a column for each stage."""
        return stage_lines(entries)


class Losses(Observer):
    """The loss of each step, as the test found it."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses = list(losses)

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """The row's "losses"."""
        row["losses"] = self.losses


class Compile(Observer):
    """What compiling costs: the first step, compiled from nothing, and the peaks of the steps before steady state."""

    @classmethod
    def around(cls, plan: Plan) -> AbstractContextManager[None]:
        """Compile from nothing: no cache of an earlier compilation, on disk or in the process, is used."""
        return cold_compiler(plan.device)

    @classmethod
    def before_first_step(cls, memory: Meter) -> None:
        """Mark what is live before the first step, which may leave something behind."""
        memory.mark("before_first_step")

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> float | None:
        """Seconds of the first step, where it compiled anything."""
        return measured.first_step if has_compiled() else None

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's "memory" the "peaks"; in its "time" the "first_step", and what it took beyond the median."""
        row["memory"]["peaks"] = largest_memory(ranks).peaks
        first_steps = [seconds for rank in ranks if (seconds := rank.observed[type(self)]) is not None]
        if first_steps:
            row["time"]["first_step"] = max(first_steps)
            row["time"]["compile"] = max(first_steps) - median(step_seconds(ranks))


class ExposedCommunication(Observer):
    """The communication that computation did not hide: what a step's parts take beyond those of computation alone.

    The workload's `compute_step(mark)` is its step without communication.
    """

    needs: ClassVar[tuple[str, ...]] = ("compute_step",)
    timed: ClassVar[Mapping[str, str]] = {COMPUTE: "compute_step"}

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """The row's time by part: computation's own, and all that the ranks took beyond them as "communication"."""
        parts, compute = mean_parts(ranks, IMPLEMENTATION), mean_parts(ranks, COMPUTE)
        together = sum(parts[part] for part in {*compute, "communication"})
        row["time"]["parts"] = parts | compute | {"communication": together - sum(compute.values())}


class HiddenCommunication(ExposedCommunication):
    """The share of communication that the step hid, too: all of it where it takes no longer than computation alone.

    The workload's `communication_step(mark)` is its communication without the rest.
    """

    needs = ("compute_step", "communication_step")
    timed: ClassVar[Mapping[str, str]] = {COMPUTE: "compute_step", COMMUNICATION: "communication_step"}

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's time: the medians of "compute_alone" and "communication_alone", and the share "hidden"."""
        super().fill(row, ranks)
        names = (IMPLEMENTATION, COMPUTE, COMMUNICATION)
        step, compute, communication = (median(step_seconds(ranks, name)) for name in names)
        row["time"] |= {
            "compute_alone": compute,
            "communication_alone": communication,
            "hidden": 1 - (step - compute) / communication,
        }


class Goals(Observer):
    """Ambitions of the row's limit: at least so much of "mfu" or of "fraction". Reported, and nothing fails by them."""

    min_rounds = fewest_rounds(SHOWN_CONFIDENCE)

    def __init__(self, **goals: float) -> None:
        self.goals = goals

    def fill(self, row: Row, ranks: list[Measured]) -> None:
        """In the row's "limit". A figure is so many FLOPs or bytes over the step time, whose interval decides."""
        seconds, limit = step_seconds(ranks), row["limit"]
        step = median_interval(seconds)
        longest = {name: tolerated(limit[name] * fmean(seconds) / goal) for name, goal in self.goals.items()}
        limit["goals"] = {
            name: {"goal": goal, "outcome": step.outcome(longest[name])} for name, goal in self.goals.items()
        }


class PeakByLength(Observer):
    """How the peak grows with the sequence, of cases that have a `seq`: a fit under the table, nothing in the row."""

    def lines(self, entries: Sequence[Entry]) -> Iterator[str]:
        """One for each implementation and kind of case that was metered at enough lengths."""
        return peaks_by_length(entries)

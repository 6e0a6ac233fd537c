"""The memory of a user's own model under one strategy, and a step's time, on the first rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardmark.api.finding import RegistryError
from shardmark.api.own_model import OwnModelCase, make, size_of
from shardmark.api.recipe import PLAIN, Recipe
from shardmark.api.registry import Implementation, Unsupported, family
from shardmark.meter import memory
from shardmark.meter.hardware import Hardware
from shardmark.meter.plan import Plan
from shardmark.predict.own_model import check
from shardmark.predict.simulation.predict import predict, simulation
from shardmark.predict.simulation.schedule import Step
from shardmark.predict.simulation.within import within
from shardmark.rows.observers import Observer

_TOO_LARGE = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
"""PyTorch's error for a tensor larger than this machine's address space."""

MOST = 2**62
"""Bytes of the device in predictions, too many to run out of: reserved bytes are an upper bound."""


@dataclass(frozen=True)
class Strategy:
    """An implementation; perhaps with each block checkpointed, or under autocast to bfloat16."""

    implementation: Implementation
    checkpointed: bool = False
    autocast: bool = False

    @property
    def family(self) -> str:
        return self.implementation.family

    @property
    def on_ranks(self) -> bool:
        """True where training needs a process group."""
        return family(self.family).on_ranks

    def __str__(self) -> str:
        more = ["checkpointing"] * self.checkpointed + ["autocast"] * self.autocast
        return " + ".join([f"{self.family}={self.implementation}", *more])


@dataclass(frozen=True)
class StepTime:
    """Seconds of a steady-state step: the host launches the next step while the device runs this one."""

    seconds: float
    at_least: float
    """The lower bound: by the data sheet alone."""
    interval: tuple[float, float]
    """Nine of ten published steps of the kind lie between these."""


@dataclass(frozen=True)
class Prediction:
    """Bytes on the first rank, which needs the most where ranks differ."""

    tensors: int
    """Peak bytes of tensors in a step."""
    reserved: int
    """Peak bytes that steps reserve on the device, with the caching allocator's free space between its blocks."""
    before_step: int
    """Bytes live before a steady-state step: neither a smaller batch nor checkpointing makes them fewer."""
    made: int
    """Peak bytes reserved on the device until the model is made and sharded."""
    steps: dict[str, StepTime] = field(default_factory=dict)
    """A step's time, by hardware; empty for a compiled model."""


@dataclass(frozen=True)
class Refused:
    """Why there is no prediction; if one tensor is too large, its bytes."""

    reason: str
    nbytes: int = 0


class _Made(Observer):
    """Empties the allocator's cache before the first step, as PyTorch itself does when memory runs out."""

    of_memory = True

    @classmethod
    def before_first_step(cls, memory: memory.Meter) -> None:
        memory.stage("made")
        torch.cuda.empty_cache()


def predicted(
    strategy: Strategy, case: OwnModelCase, on: Hardware, alike: Sequence[Hardware] = ()
) -> Prediction | Refused:
    """Predict the case under a strategy on `on`, with step times on `alike`, devices that need the same memory."""
    case = replace(case, checkpointed=strategy.checkpointed, autocast=strategy.autocast)
    workload = family(strategy.family).workload
    assert workload is not None, "a strategy is of a family that trains a user's own model"
    plan = Plan(workload, strategy.implementation, None, case, "cpu", case.ranks, observers=(_Made,))
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch's, for the strategy's author
            measured = predict(plan, on=replace(on, memory_bytes=MOST), alike=alike)
    except Exception as error:  # a strategy that does not take the model is a line of the table
        return _refused(error)
    taken = measured.memory
    made = taken.stages["made"]
    return Prediction(
        tensors=max(taken.peaks.values()),
        reserved=taken.reserved or taken.peak,  # on CPU no freed block stays reserved
        before_step=taken.phases["before_step"],
        made=made.reserved or made.peak,
        steps={
            each.name: _step_time(measured.steps[each.name], each)
            for each in (on, *alike)
            if each.name in measured.steps
        },
    )


def _step_time(step: Step, on: Hardware) -> StepTime:
    seconds, known = max(step.seconds, step.host), within(step, on)
    return StepTime(seconds, step.at_least, (max(known.low * seconds, step.at_least), known.high * seconds))


def _refused(error: Exception) -> Refused:
    if found := _TOO_LARGE.search(str(error.__cause__ or error)):
        nbytes = int(found[1])
        return Refused(f"one tensor of it has {nbytes / 2**30:,.1f} GiB, more than this machine can lay out", nbytes)
    said = next(iter(str(error).strip().splitlines()), "")
    kind = "" if isinstance(error, Unsupported | RegistryError) else f"{type(error).__name__}: "
    return Refused(kind + said.removeprefix("--model "))


Sizes = tuple[int | str, int | str]
"""Rows and context of a batch: the sizes of its tensors' dimensions 0 and 1, or why they have no common size."""


def followed(spec: str, recipe: Recipe = PLAIN) -> tuple[OwnModelCase, Sizes]:
    """The model's case, and the sizes of its batch. RegistryError, in one line, for a spec that makes no model, and
    for a model that no strategy could train."""
    case = OwnModelCase.of(check(spec, simulated=True, recipe=recipe))
    with simulation(), torch.random.fork_rng(devices=[]):
        batch = make(case.model, "cpu").batch
    return case, (_size(batch, 0), _size(batch, 1))


def _size(batch: tuple[Any, ...], dim: int) -> int | str:
    try:
        return size_of(batch, dim)
    except Unsupported as error:
        return str(error)

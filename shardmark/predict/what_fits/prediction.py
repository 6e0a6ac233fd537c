"""The memory of a user's own model under one strategy, and a step's time, on the first rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardmark.api.finding import RegistryError
from shardmark.api.own_model import OwnModelCase, make, size_of
from shardmark.api.recipe import PLAIN, Recipe
from shardmark.api.registry import FAMILIES, Implementation, Unsupported, family
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
"""Bytes of the device in predictions, too many to run out of: the allocator frees no cached block for want of room."""


@dataclass(frozen=True)
class Strategy:
    """An implementation; perhaps with each block checkpointed, with a float32 model's products in bfloat16, or with
    shards in the host's memory."""

    implementation: Implementation
    checkpointed: bool = False
    bfloat16: bool = False
    offloaded: bool = False

    @property
    def family(self) -> str:
        return self.implementation.family

    @property
    def on_ranks(self) -> bool:
        """True where training needs a process group."""
        return family(self.family).on_ranks

    @property
    def label(self) -> str:
        """Its name in a table: without the family, where no other one has an implementation of that name."""
        name = self.implementation.name
        named = [each.name for each in FAMILIES.values() if each.workload is not None and name in each.implementations]
        return str(self) if named != [self.family] else str(self).removeprefix(f"{self.family}=")

    def __str__(self) -> str:
        more = ["checkpointing"] * self.checkpointed + ["bfloat16"] * self.bfloat16 + ["offload"] * self.offloaded
        return " + ".join([f"{self.family}={self.implementation}", *more])


@dataclass(frozen=True)
class StepTime:
    """Seconds of a steady-state step: the host launches the next step while the device runs this one."""

    seconds: float
    at_least: float
    """The lower bound: by the data sheet alone."""
    interval: tuple[float, float]
    """Nine of ten published steps of the kind lie between these."""
    peak: float = 0.0
    """The data sheet's FLOP/s at the dtypes of the step's products."""


@dataclass(frozen=True)
class Prediction:
    """Bytes on the first rank, which needs the most where ranks differ."""

    tensors: int
    """Peak bytes of tensors in a step."""
    reserved: int
    """Estimate of the peak bytes that steps reserve on the device: the caching allocator's blocks and the free space
    between them."""
    at_most: int
    """The same, if the allocator reuses a block only once the host has waited for each stream that used it."""
    before_step: int
    """Bytes live before a steady-state step: neither a smaller batch nor checkpointing makes them fewer."""
    made: int
    """Peak bytes reserved on the device until the model is made and sharded."""
    steps: dict[str, StepTime] = field(default_factory=dict)
    """A step's time, by hardware."""
    host: int = 0
    """Peak bytes of tensors that are offloaded to the host's memory."""
    pinned: int = 0
    """Peak bytes of pinned blocks there, as PyTorch rounds them up."""


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
    recipe = replace(case.recipe, compute_dtype="bfloat16") if strategy.bfloat16 else case.recipe
    case = replace(case, checkpointed=strategy.checkpointed, offload=strategy.offloaded, recipe=recipe)
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
        at_most=taken.reserved_at_most or taken.peak,
        before_step=taken.phases["before_step"],
        made=made.reserved or made.peak,
        host=taken.host,
        pinned=taken.pinned,
        steps={
            each.name: _step_time(measured.steps[each.name], each)
            for each in (on, *alike)
            if each.name in measured.steps
        },
    )


def _step_time(step: Step, on: Hardware) -> StepTime:
    seconds, known = max(step.seconds, step.host), within(step, on)
    interval = max(known.low * seconds, step.at_least), max(known.high * seconds, step.at_least)
    return StepTime(seconds, step.at_least, interval, step.peak)


def _refused(error: Exception) -> Refused:
    if found := _TOO_LARGE.search(str(error.__cause__ or error)):
        nbytes = int(found[1])
        return Refused(f"one tensor of it has {nbytes / 2**30:,.1f} GiB, more than this machine can lay out", nbytes)
    said = next(iter(str(error).strip().splitlines()), "")
    kind = "" if isinstance(error, Unsupported | RegistryError) else f"{type(error).__name__}: "
    return Refused(kind + said.removeprefix("--model "))


Sizes = tuple[int | str, int | str]
"""Rows and context of a batch: the sizes of its tensors' dimensions 0 and 1, or why they have no common size."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a user's own model and its batch."""

    case: OwnModelCase
    sizes: Sizes
    tokens: int | None = None
    """Tokens in a row of the batch; None where its first tensor is not one of whole numbers, (rows, context)."""
    has_blocks: bool = True
    """Whether it has blocks, whose activations checkpointing recomputes."""


def followed(spec: str, recipe: Recipe = PLAIN) -> ModelFacts:
    """Facts about the model. RegistryError, in one line, for a spec that makes no model, and for a model that no
    strategy could train."""
    case = OwnModelCase.of(check(spec, simulated=True, recipe=recipe))
    with simulation(), torch.random.fork_rng(devices=[]):
        made = make(case.model, "cpu")
    first = next((each for each in tree_leaves(made.batch) if isinstance(each, torch.Tensor)), None)
    of_tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
    tokens = first.size(1) if first is not None and of_tokens else None
    return ModelFacts(case, (_size(made.batch, 0), _size(made.batch, 1)), tokens, len(made.blocks) > 0)


def _size(batch: tuple[Any, ...], dim: int) -> int | str:
    try:
        return size_of(batch, dim)
    except Unsupported as error:
        return str(error)

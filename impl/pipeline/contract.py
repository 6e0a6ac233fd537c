"""The contract of pipeline parallelism, in two forms, the check that a target meets one of them, and the family."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from impl.pipeline.accounting import sleeping_peak
from impl.pipeline.actions import Action, Plan, plan_of
from impl.pipeline.checking import checked
from impl.pipeline.runner import Build, Loss, Runner, Tensors
from shardmark.api import Family, Race, Refusable, RegistryError, add_family, register

Schedule = Callable[[int, int], Sequence[Sequence[str | Action]]]


class Pipeline(Protocol):
    """`schedule(ranks, micro_batches)`, which returns for each rank its actions in order, in the notation of
    torch.distributed.pipelining (`impl.pipeline.actions`); the suite's runner carries it out. Or
    `make(build, group, micro_batches, *, loss, unequal=False)`, for a runner of one's own, which returns an object
    with the members below.

    Stages are numbered in the order in which a micro-batch goes through them. `build(stage, stages)` makes one, whose
    input is what the stage before returned, a tensor or a tuple of some. `loss(output, target)` is of one micro-batch.
    With `unequal`, micro-batches may differ in rows, and from step to step. Each rank has one stage at least.

    A schedule must:

    - Have each stage on one rank, which has each micro-batch once: 0F1, and then either 0B1, or 0I1 and later 0W1.
    - Have each action behind what it needs. Sends and receives may be left out: the suite puts them in. With them it
      must end also if each send waits for its receipt.

    A runner that `make` returns must:

    - Add to the parameters' gradients, in `step`, those of the sum of the losses, as one process does, in float64 to
      1e-12: they accumulate from step to step until they are set to None, and are not scaled. It returns that sum on
      every rank, and later steps leave it as it is.
    - Leave frozen parameters, of integers too and also those frozen or thawed between steps, without a gradient;
      inputs, targets and stages' modes as they are; buffers as one process does; random numbers to stages and the
      caller.
    - Take what a stage may return: tensors of any shapes, dtypes and strides, infinite ones too, of which some need no
      gradient, in all or in some micro-batches, some are those that it was given, and the next one may use only some.
      The loss is given what the last one returned. Stages' hooks run.
    - Run passes under the caller's autocast, which may be another one in the next step; between steps the caller may
      call stages, without autograd too, give parameters other memory, and run other pipelines on the same ranks.
    - Raise an error of a stage on its rank, and leave nothing of a step but gradients, and messages' buffers, whether
      or not it raises: on one rank the next step is right. Nothing waits for Python's collector of cycles.

    Stages that change their input in place are not asked.

    Either may refuse numbers of ranks and micro-batches as `Unsupported`, and `unequal`.
    """

    modules: dict[int, nn.Module]
    """This rank's stages, by number."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor | float:
        """Pass all micro-batches through the stages and back. All ranks of the group have the same inputs, of which
        each is a tuple of tensors (rows, ...), and the same targets, tensors (rows, ...) too. Returns the sum of the
        losses."""
        ...


@dataclass(frozen=True)
class Facts:
    """Facts about a schedule that questions need, by numbers of ranks and micro-batches; None where not known."""

    bubble: Callable[[int, int], float | None] | None = None
    """Share of a step for which a rank waits, where F, I and W take equal times, and B that of two."""
    in_flight: Callable[[int, int], Sequence[int]] | None = None
    """Most forward passes that each rank holds at once."""


def is_schedule(target: Any) -> bool:
    """Whether it is `schedule(ranks, micro_batches)`, and not `make(build, group, micro_batches, *, loss)`."""
    parameters = inspect.signature(target).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2 and "loss" not in inspect.signature(target).parameters


def planned(schedule: Schedule, ranks: int, micro_batches: int, facts: Facts | None = None) -> Plan:
    """The schedule's plan with messages. ValueError, in one line, for one that is wrong."""
    found = plan_of(schedule(ranks, micro_batches))
    if len(found) != ranks:
        raise ValueError(f"it has actions for {len(found)} ranks, and not for {ranks}")
    most = None if facts is None or facts.in_flight is None else facts.in_flight(ranks, micro_batches)
    return checked(found, micro_batches, most)


def run(
    schedule: Schedule,
    build: Build,
    group: dist.ProcessGroup,
    micro_batches: int,
    *,
    loss: Loss,
    unequal: bool = False,
) -> Runner:
    """A runner of the schedule's plan, which takes micro-batches of any rows."""
    return Runner(planned(schedule, group.size(), micro_batches), build, group, loss)


def adapted(target: Any) -> Callable[..., Pipeline]:
    """The target as `make`."""
    return partial(run, target) if is_schedule(target) else target


def _check(target: Any, device: str) -> None:
    """Check the signature; correctness tests check the rest."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; it is schedule(ranks, micro_batches) or a runner's make")
    if is_schedule(target):
        return
    try:
        inspect.signature(target).bind(None, None, 1, loss=None, unequal=False)
    except TypeError as error:
        raise RegistryError(
            f"it is called neither as schedule(ranks, micro_batches) nor as make(build, group, micro_batches, *, loss, "
            f"unequal=False): {error}"
        ) from None


def _numbers(build: Build, group: dist.ProcessGroup, micro_batches: int, **_: Any) -> str:
    return f"{micro_batches} micro-batches on {group.size()} ranks"


FAMILY = add_family(
    Family(
        "pipeline",
        Pipeline,
        reference="gpipe",
        check=_check,
        adapt=adapted,
        may_refuse=(
            Refusable("numbers of micro-batches", _numbers, elsewhere=True),
            Refusable("unequal micro-batches", lambda *_, unequal=False, **__: "unequal" if unequal else None),
        ),
        memory=sleeping_peak,
        ranks_alike=False,
        facts=Facts(),
    )
)


def register_schedule(name: str, schedule: Schedule, facts: Facts, beside: str, **options: Any) -> None:
    """Register a schedule with its facts; `beside` is the runner that steps of real stages are timed with."""
    races = {"stages": Race(beside)}
    register("pipeline", name, schedule, facts=facts, memory=sleeping_peak, races=races, **options)

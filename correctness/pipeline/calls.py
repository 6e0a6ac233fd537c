"""Single steps of a pipeline: gradients of several, stages that raise, tensors that outlive the step."""

from __future__ import annotations

import gc
import os
import signal
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from correctness.pipeline.stages import build, builder, loss, micro_batches
from correctness.pipeline.training import Trained, group_of, in_one_process, named
from correctness.support.contracts import without_the_collector
from correctness.support.waiting import wait_until
from impl.pipeline import gpipe, one_forward_one_backward, run
from impl.pipeline.actions import Action
from impl.pipeline.runner import Does
from shardmark.api import Implementation, Mesh

COUNT = 4


def accumulate_on_rank(implementation: Implementation, mesh: Mesh, device: str, steps: int) -> Trained:
    """Gradients of several steps of the same batch, which nobody sets to None in between."""
    pipeline = implementation.watched(builder("plain", device), group_of(mesh, device), COUNT, loss=loss)
    losses = [float(pipeline.step(*micro_batches(COUNT, 0, device, True))) for _ in range(steps)]
    parameters = named(pipeline.modules)
    found = {name: p.grad.cpu() / steps for name, p in parameters.items() if p.grad is not None}
    parameters_then = {name: p.detach().cpu() for name, p in parameters.items()}
    return Trained(0, losses=losses, gradients=found, parameters=parameters_then)


def of_one_step(stages: int, steps: int) -> Trained:
    """A step of one process, whose loss comes as many times."""
    one = in_one_process("plain", stages, COUNT, 1, True)
    parameters = named({stage: build("plain", "cpu", stage, stages) for stage in range(stages)})
    parameters_then = {name: p.detach() for name, p in parameters.items()}
    return Trained(stages, losses=one.losses * steps, gradients=one.gradients, parameters=parameters_then)


class Refused(Exception):
    """An error of a stage's own."""


class Refusing(nn.Module):
    """A stage that raises when it is given a third micro-batch."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole, self.taken = whole, 0

    def forward(self, *x: Any) -> Any:
        self.taken += 1
        if self.taken > 2:
            raise Refused("the last stage takes no third micro-batch")
        return self.whole(*x)


def _refusing(device: str, stage: int, stages: int) -> nn.Module:
    module = build("plain", device, stage, stages)
    return Refusing(module) if stage == stages - 1 else module


def refuse_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> None:
    pipeline = implementation.watched(partial(_refusing, device), group_of(mesh, device), COUNT, loss=loss)
    pipeline.step(*micro_batches(COUNT, 0, device, True))


class RefusesOnce:
    """A loss that raises when it has been asked for the third time, or whose backward pass raises then."""

    def __init__(self, where: str) -> None:
        self.where, self.asked = where, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.asked += 1
        if self.asked == 3 and self.where == "forward":
            raise Refused("no third micro-batch")
        found = loss(output, target)
        if self.asked == 3:
            found.register_hook(_refuse)
        return found


def _refuse(gradient: Tensor) -> None:
    raise Refused("no third gradient")


def step_after_an_error_on_rank(
    implementation: Implementation, mesh: Mesh, where: str, device: str
) -> tuple[list[str], Trained]:
    """Tensors that are alive after a step that raised, and the step after it."""
    noted = Noted()
    pipeline = implementation.watched(
        lambda stage, stages: Noting(build("plain", device, stage, stages), noted, stage),
        group_of(mesh, device),
        COUNT,
        loss=RefusesOnce(where),
    )
    with without_the_collector():
        try:
            pipeline.step(*micro_batches(COUNT, 1, device, True))
        except Exception as error:
            if "no third" not in f"{error} {error.__cause__}":
                raise
            for each in (error, error.__cause__, error.__context__):
                traceback.clear_frames(each and each.__traceback__)
        else:
            raise AssertionError("the error of a loss is not raised")
        alive = noted.alive(pipeline.modules) + ["a graph"] * bool(noted.marks)
    parameters = {name.replace(".whole.", "."): p for name, p in named(pipeline.modules).items()}
    for parameter in parameters.values():
        parameter.grad = None
    after = float(pipeline.step(*micro_batches(COUNT, 0, device, True)))
    gradients = {name: p.grad.cpu() for name, p in parameters.items() if p.grad is not None}
    return alive, Trained(0, losses=[after], gradients=gradients, parameters=_on_cpu(parameters))


def _on_cpu(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in parameters.items()}


class Dying(Refusing):
    """A stage whose process ends when it is given a third micro-batch."""

    def forward(self, *x: Any) -> Any:
        self.taken += 1
        if self.taken > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.whole(*x)


def die_on_rank(mesh: Mesh, device: str) -> None:
    def dying(stage: int, stages: int) -> nn.Module:
        module = build("plain", device, stage, stages)
        return Dying(module) if stage == stages - 1 else module

    pipeline = run(gpipe, dying, group_of(mesh, device), COUNT, loss=loss)
    pipeline.step(*micro_batches(COUNT, 0, device, True))


class Noting(nn.Module):
    """A stage that notes its forward passes, without keeping them."""

    def __init__(self, whole: nn.Module, noted: Noted, stage: int) -> None:
        super().__init__()
        self.whole, self.noted, self.stage = whole, noted, stage

    def forward(self, *x: Any) -> Any:
        if self.stage:
            self.noted.received |= {StorageWeakRef(each.untyped_storage()) for each in x if isinstance(each, Tensor)}
        out = self.whole(*x)
        out = _Marked.apply(out, self.noted) if torch.is_grad_enabled() and out.requires_grad else out
        self.noted.memory.append((f"an output of stage {self.stage}", StorageWeakRef(out.untyped_storage())))
        return out


class _Marked(torch.autograd.Function):
    """The same values; their graph keeps a mark alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: Noted) -> Tensor:
        ctx.mark = noted.mark()
        return x.clone()  # PyTorch's zero-bubble schedules detach outputs in place, and refuse views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Mark:
    """Lives as long as the graph of one forward pass."""


@dataclass
class Noted:
    """A rank's forward passes whose graphs are alive."""

    marks: weakref.WeakSet[Mark] = field(default_factory=weakref.WeakSet)
    most: int = 0
    """The most of them that were alive at once."""
    memory: list[tuple[str, StorageWeakRef]] = field(default_factory=list)
    """That of the step's tensors, which is not to live longer; messages may have buffers that do."""
    received: set[StorageWeakRef] = field(default_factory=set)
    """The memory of what stages have received, in all steps."""

    def received_and_alive(self) -> int:
        return sum(not each.expired() for each in self.received)

    def alive(self, stages: Iterable[int]) -> list[str]:
        """Names of a step's tensors whose memory is alive, on a rank with these stages, but for those between them."""
        messages = {f"an output of stage {stage - 1}" for stage in stages}
        return sorted({what for what, memory in self.memory if not memory.expired()} - messages)

    def mark(self) -> Mark:
        found = Mark()
        self.marks.add(found)
        self.most = max(self.most, len(self.marks))
        return found


def note_on_rank(implementation: Implementation, mesh: Mesh, count: int, device: str) -> tuple[int, int, list[str]]:
    """Forward passes of a rank that are alive after a step, the fourth one, the most of them during it, and which
    tensors are alive after it."""
    noted = Noted()
    pipeline = implementation.watched(
        lambda stage, stages: Noting(build("plain", device, stage, stages), noted, stage),
        group_of(mesh, device),
        count,
        loss=loss,
    )
    gc.collect()
    with without_the_collector():  # what waits for it may be gigabytes
        buffers = []
        for _ in range(4):  # the first one may try shapes
            buffers.append(noted.received_and_alive())
            noted.most = 0
            noted.memory.clear()
            inputs, targets = micro_batches(count, 0, device, True)
            pipeline.step(inputs, targets)
        noted.memory += [("an input", StorageWeakRef(x.untyped_storage())) for (x,) in inputs]
        noted.memory += [("a target", StorageWeakRef(y.untyped_storage())) for y in targets]
        del inputs, targets
        wait_until(lambda: noted.received_and_alive() <= buffers[2], seconds=2)
        grown = noted.received_and_alive() - buffers[2]
    more = [f"what a stage received ({grown} tensors since the second step)"] * (grown > 0)
    gc.collect()
    # A message that was sent may hold its tensor for a moment.
    wait_until(lambda: not noted.alive(pipeline.modules), seconds=2)
    return len(noted.marks), noted.most, noted.alive(pipeline.modules) + more


def complaints_of_memory(ranks: list[tuple[int, int, list[str]]], stated: Any, count: int) -> Iterator[str]:
    for rank, (after, most, alive) in enumerate(ranks):
        yield from (f"{what} is alive on rank {rank} after the step" for what in alive)
        if after:
            yield f"{after} forward passes are alive on rank {rank} after the step"
        if stated is not None and most > stated[rank]:
            yield f"rank {rank} holds {most} forward passes of {count} at once; {stated[rank]} are stated"


def step_with_other_numbers_on_rank(mesh: Mesh, device: str) -> list[str]:
    """Errors of steps that have more micro-batches than a pipeline was made for, or fewer targets."""
    pipeline = run(gpipe, builder("plain", device), group_of(mesh, device), COUNT, loss=loss)
    inputs, targets = micro_batches(COUNT + 1, 0, device, True)
    found = []
    for given in ((inputs, targets), (inputs[:COUNT], targets[:2])):
        try:
            pipeline.step(*given)
        except ValueError as error:
            found.append(str(error))
    return found


def sent_that_is_alive_on_rank(mesh: Mesh, device: str) -> int:
    """The most tensors that a rank of 1F1B keeps for its sends, of 16 micro-batches."""
    most = 0
    pipeline = run(one_forward_one_backward, builder("plain", device), group_of(mesh, device), 16, loss=loss)

    def counted(does: Does, action: Action) -> None:
        nonlocal most
        does(action)
        most = max(most, len(pipeline.exchange.under_way))

    pipeline.around = counted
    pipeline.step(*micro_batches(16, 0, device, True))
    return most

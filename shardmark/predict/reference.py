"""Simulate a plain step and find its live bytes, by name, at each moment."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from shardmark.api.reference import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BACKWARD,
    BEGIN,
    ENTER,
    GRADIENT,
    GRADIENTS,
    INPUTS,
    LEAVE,
    PARAMETERS,
    READ,
    READ_END,
    Followed,
    Moment,
    Plain,
)
from shardmark.meter.allocations import Allocated, Block, Event, Marked, Released
from shardmark.meter.hardware import CPU, hardware
from shardmark.meter.recording import mark, recording, without_operators
from shardmark.predict.simulation.kinds import tensors_in
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.schedule import Schedule

MOMENT = "moment "
STEPPED = "stepped"
_CUDA = "h100-80gb"
_RETURNED_BY = "_returned_by"
"""Attribute of a tensor: names of the modules that returned it."""


def follow(plain: Plain, device: str) -> Followed:
    """The moments of the plain step, by the rules of "cpu" or "cuda"."""
    on = CPU if device == "cpu" else hardware(_CUDA)
    marks = _Marks()
    with (
        warnings.catch_warnings(action="ignore"),
        simulation(on=on, schedule=marks),
        without_operators(),
        recording("cpu") as recorded,
    ):
        step = plain.make()
        marks.owned = {p.data_ptr(): name for name, p in step.module.named_parameters()}
        parameters = {name: tuple(p.shape) for name, p in step.module.named_parameters()}
        _mark_moments(step.module, marks)
        marks.leave(BEGIN)
        loss = step.loss()
        marks.leave(AFTER_FORWARD)
        loss.backward()
        marks.leave(AFTER_BACKWARD)
        marks.began = False
        if step.optimizer is not None:
            step.optimizer.step()
        marks.leave(STEPPED)
        del step, loss
    moments, state = _moments(recorded.replay(), marks.owned)
    return Followed(moments, parameters, state)


class _Marks(Schedule):
    """Leaves a mark at each moment, and sees each operator that reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[int, str] = {}
        """Names of parameters, by address."""
        self.began = False
        self._read: list[str] = []
        """Parameters that an operator reads now, or in backward its autograd node holds."""
        self._by: tuple[OpOverload, Any] | None = None

    @property
    def running(self) -> bool:
        return self.began

    def leave(self, kind: str, name: str = "", number: int = 0) -> None:
        """End the reads under way, then write the moment's mark."""
        self._end_read()
        _mark(kind, name, number)
        self.began = self.began or kind == BEGIN

    def backward(self, modules: Sequence[str], gradient: Tensor) -> None:
        """Backward reached the output of these modules, given innermost first; record the outermost first."""
        for inward, name in enumerate(reversed(modules)):
            self.leave(BACKWARD, name, inward)

    def arrived(self, operator: OpOverload, args: tuple[Any, ...]) -> None:
        if _is_view(operator):
            return
        by = operator, torch._C._current_autograd_node()
        if by != self._by:  # a node makes both gradients of a product by the same operator, and holds what it reads
            self._end_read()
        found = {self.owned.get(tensor.data_ptr()) for tensor in tensors_in(args)} - {None, *self._read}
        if found:
            self._by = by
            read = [name for name in self.owned.values() if name in found]
            self._read += read
            for name in read:
                _mark(READ, name)

    def operator(self, operator: OpOverload, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._end_read()

    def _end_read(self) -> None:
        for name in self._read:
            _mark(READ_END, name)
        self._read, self._by = [], None


def _is_view(operator: OpOverload) -> bool:
    return any(result.alias_info is not None for result in operator._schema.returns)


def _mark(kind: str, name: str, number: int = 0) -> None:
    mark(f"{MOMENT}{kind};{name};{number}")


def _mark_moments(root: nn.Module, marks: _Marks) -> None:
    """Mark each module's forward and backward, and each parameter's gradient."""
    for name, module in root.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            marks.leave(ENTER, name)

        def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            marks.leave(LEAVE, name)
            if isinstance(output, Tensor) and output.requires_grad:
                returned_by = vars(output).setdefault(_RETURNED_BY, [])
                returned_by.append(name)
                if len(returned_by) == 1:
                    output.register_hook(partial(marks.backward, returned_by))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    for name, parameter in root.named_parameters():

        def there(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            marks.leave(GRADIENT, name, parameter.grad.data_ptr())

        parameter.register_post_accumulate_grad_hook(there)


def _moments(events: Sequence[Event], owned: Mapping[int, str]) -> tuple[list[Moment], int]:
    """The moments of forward and backward, and the bytes that the optimizer's step leaves."""
    live = _Named(owned)
    moments: list[Moment] = []
    for event in events:
        match event:
            case Allocated(block) if not block.workspace:
                live.take(block)
            case Released(block) if not block.workspace:
                live.free(block)
            case Marked(name) if name.startswith(MOMENT):
                kind, where, number = name.removeprefix(MOMENT).split(";")
                if kind == STEPPED:  # the update has no temporaries: all bytes that it adds are state
                    moments.append(Moment(AFTER_BACKWARD, "", live.began, live.began))
                    return moments, live.total - sum(live.began.values())
                if live.moment is not None:
                    moments.append(Moment(*live.moment, live.began, live.at_peak()))
                live.begin(kind, where, int(number))
    raise AssertionError("the step has no end")


class _Named:
    """Bytes live by name, and at the peak since the last moment."""

    def __init__(self, owned: Mapping[int, str]) -> None:
        self.owned = owned
        self.moment: tuple[str, str] | None = None
        self.began: dict[str, int] = {}
        self.total = 0
        self._live: dict[str, int] = defaultdict(int)
        self._names: dict[Block, str] = {}
        self._at: dict[int, Block] = {}
        self._running = [""]  # modules of forward, the innermost last
        self._backward = False
        self._most = 0
        self._peak: dict[str, int] = {}

    def take(self, block: Block) -> None:
        self._at[block.address] = block
        self._add(block, self._name(block))
        self.total += block.nbytes

    def free(self, block: Block) -> None:
        self._note_peak()
        self._live[self._names.pop(block)] -= block.nbytes
        self.total -= block.nbytes

    def begin(self, kind: str, where: str, number: int) -> None:
        """`number` is a gradient's address, or the number of modules around this one that returned the same tensor."""
        if kind == ENTER:
            self._running.append(where)
        elif kind == LEAVE:
            self._running.pop()
        elif kind == BACKWARD and not number:
            self._running[-1] = where
        elif kind == GRADIENT and (block := self._at.get(number)) in self._names:
            self._live[self._names[block]] -= block.nbytes
            self._add(block, GRADIENTS)
        self._backward = self._backward or kind == AFTER_FORWARD
        self.moment, self.began = (kind, where), self._copy()
        self._most, self._peak = self.total, self.began

    def at_peak(self) -> dict[str, int]:
        self._note_peak()
        return self._peak

    def _note_peak(self) -> None:
        if self.moment is not None and self.total > self._most:
            self._most, self._peak = self.total, self._copy()

    def _copy(self) -> dict[str, int]:
        return {name: nbytes for name, nbytes in self._live.items() if nbytes}

    def _add(self, block: Block, name: str) -> None:
        self._names[block] = name
        self._live[name] += block.nbytes

    def _name(self, block: Block) -> str:
        if self.moment is None:
            return PARAMETERS if block.address in self.owned else INPUTS
        module = ".".join("*" if part.isdecimal() else part for part in self._running[-1].split("."))
        return f"{'backward of' if self._backward else 'activations of'} {module or 'the loss'}"

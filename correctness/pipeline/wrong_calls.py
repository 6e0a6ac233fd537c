"""Defects of pipelines' runners that show by what the caller does round steps: autocast, few bits, calls of stages."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from correctness.pipeline.wrong import Planted, parameters_of
from correctness.support.planting import defect
from impl.pipeline import zero_bubble
from impl.pipeline.actions import Action
from impl.pipeline.deferred import Later, deferring


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class PassesOnAThread(Planted):
    """Forward passes run on a thread of their own, where the caller's autocast does not hold."""

    def _forward(self, action: Action) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(super()._forward, action).result()


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class AddsLossesInTheParametersDtype(Planted):
    """A sum of losses in bfloat16 has three digits."""

    def _run(self) -> None:
        self.total = self.total.to(parameters_of(self)[0].dtype)
        super()._run()


@defect(cause="two calls", caught_by="test_any_history_is_that_of_one_process")
class TakesAnyCallForItsOwn(Planted):
    """A hook notes what a stage returns, and the i-th note is taken for micro-batch i: a call by the caller, who
    evaluates between steps, shifts them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
        for stage, module in self.modules.items():
            module.register_forward_hook(partial(self._note, stage))

    def _note(self, stage: int, module: nn.Module, given: Any, returned: Any) -> None:
        self.noted[stage].append(returned if isinstance(returned, tuple) else (returned,))

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        if action.stage < self.stages - 1:
            self.kept[key] = self.kept[key][0], self.noted[action.stage][action.micro_batch]
        super()._backward(action)

    def _run(self) -> None:
        super()._run()
        self.noted.clear()


class _Forward:
    """A stage's `forward`, without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.module.forward(*args, **options)


@defect(cause="handles", caught_by="test_any_history_is_that_of_one_process")
class CallsForward(Planted):
    """A stage's `forward` is called, and not the stage: its hooks do not run, which parametrizations are made of."""

    def _forward(self, action: Action) -> None:
        own, self.modules = self.modules, {stage: _Forward(each) for stage, each in self.modules.items()}  # type: ignore[misc]
        try:
            super()._forward(action)
        finally:
            self.modules = own


@defect(cause="state", caught_by="test_any_history_is_that_of_one_process")
class TrainsInEachStep(Planted):
    """A step sets its stages to training mode, which the caller has set to evaluation, as with frozen norms."""

    def step(self, *args: Any, **options: Any) -> Tensor:
        for module in self.modules.values():
            module.train()
        return super().step(*args, **options)


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class AddsZeroTimesItsInputs(Planted):
    """So that each input has a gradient, zero times its sum is added to an output: NaN where it is infinite."""

    def _as_inputs(self, arrived: Any) -> Any:
        self.given = super()._as_inputs(arrived)
        return self.given

    def _forward(self, action: Action) -> None:
        module, self.given = self.modules[action.stage], ()
        hook = module.register_forward_hook(self._tied)
        try:
            super()._forward(action)
        finally:
            hook.remove()

    def _tied(self, module: nn.Module, args: Any, found: Any) -> Any:
        outputs = list(found) if isinstance(found, tuple) else [found]
        place = next((i for i, each in enumerate(outputs) if each.requires_grad), None)
        for each in self.given if place is not None else ():
            if each.requires_grad:
                outputs[place] = outputs[place] + (0 * each.sum()).to(outputs[place].dtype)  # type: ignore[index]
        return tuple(outputs) if isinstance(found, tuple) else outputs[0]


@defect(cause="random numbers", caught_by="test_any_history_is_that_of_one_process")
class SeedsInEachStep(Planted):
    """Ranks are seeded alike in each step, so that stages draw the same: and so does the caller."""

    def step(self, *args: Any, **options: Any) -> Tensor:
        torch.manual_seed(1)
        return super().step(*args, **options)


@defect(cause="gradients", caught_by="test_any_history_is_that_of_one_process")
class DefersWhatTheCallerCalls(Planted):
    """Layers leave their weights' gradients for later in any call: in one of the caller's nobody finds them."""

    schedule = staticmethod(zero_bubble)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for layer in (each for stage in self.modules.values() for each in stage.modules()):
            if isinstance(layer, nn.Linear):
                layer.forward = partial(self._deferred, layer.forward, Later())  # type: ignore[method-assign]

    def _deferred(self, forward: Any, rest: Later, x: Tensor) -> Any:
        with deferring(Later.current or rest):
            return forward(x)


@defect(cause="memory", caught_by="test_any_history_is_that_of_one_process")
class ReturnsTheLossWithItsGraph(Planted):
    """The sum of the losses is not detached: a caller who keeps it for a log keeps the step's graphs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.detached = self.loss
        self.loss = self._noted

    def _noted(self, output: Any, target: Any) -> Tensor:
        self.losses = [*self.__dict__.get("losses", []), self.detached(output, target)]
        return self.losses[-1]

    def step(self, *args: Any, **options: Any) -> Tensor:
        self.losses = []
        total, own = super().step(*args, **options), sum(self.losses, torch.zeros(()))
        self.losses = []
        return total + (own - own.detach())

"""Defects of pipelines' runners that show by what the caller does round steps: autocast, few bits, calls of stages."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor, nn

from correctness.pipeline.wrong import Planted, parameters_of
from correctness.support.planting import defect
from impl.pipeline.actions import Action


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

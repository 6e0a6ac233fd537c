"""Defects of pipelines' runners that show by what comes between steps: another pipeline, another autocast, an error,
other memory of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from correctness.pipeline.wrong import Planted, parameters_of
from correctness.support.planting import defect
from impl.pipeline.actions import Action
from impl.pipeline.runner import Tensors


@defect(cause="two calls", caught_by="test_any_history_is_that_of_one_process")
class ShapesOfAllPipelines(Planted):
    """Shapes that a stage announced are kept with the class, by its number: another pipeline's stages have others."""

    known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exchange.known = self.known


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class DtypesOfTheFirstStep(Planted):
    """Dtypes of messages are found in the first step, whatever the caller's autocast is in later ones."""

    def _run(self) -> None:
        self.exchange.autocast = None
        super()._run()


@defect(cause="state", caught_by="test_any_history_is_that_of_one_process")
class PutsWeightsBack(Planted):
    """As where versions of weights are stashed (PipeDream): a step begins with the memory that parameters had first."""

    def step(self, inputs: Sequence[Tensors], targets: Sequence[Any]) -> Tensor:
        stashed: list[Tensor] = self.__dict__.setdefault("stashed", [p.data for p in parameters_of(self)])
        for parameter, memory in zip(parameters_of(self), stashed, strict=True):
            parameter.data = memory
        return super().step(inputs, targets)


@defect(cause="errors", caught_by="test_the_step_after_one_that_raised")
class FindsLossesLater(Planted):
    """A step's losses are added up behind it, and those of a step that raised count in the next one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        of_one, self.losses = self.loss, list[Tensor]()

        def noted(output: Any, target: Any) -> Tensor:
            found = of_one(output, target)
            self.losses.append(found.detach())
            return found

        self.loss = noted

    def _run(self) -> None:
        super()._run()
        self.total = self.total * 0 + sum(self.losses)
        self.losses.clear()


@defect(cause="errors", caught_by="test_the_step_after_one_that_raised")
class KeepsAStepThatRaised(Planted):
    """Graphs of a step are freed at its end, which an error does not reach."""

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        self.graphs.append(self.kept[action.stage, action.micro_batch])

    def _run(self) -> None:
        self.graphs: list[Any] = []
        super()._run()
        self.graphs.clear()

"""Where does the memory of a training step go: bytes by kind through the step, and by module and operator?

What forward keeps is held to its formula, operator by operator, on CPU. On CUDA the formula stands beside the meter and
is not judged: how kernels lay out what they give is theirs to choose there, and has not been met yet.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from impl.accounting.model import activations
from impl.accounting.training_step import work
from impl.model import SIZES
from perf.test_training_step import LanguageModelStep
from shardmark import cases
from shardmark.cases import TrainingStepCase
from shardmark.measure import Measure
from shardmark.registry import Implementation


class LabelledStep(LanguageModelStep):
    """The step that tells what its tensors are."""

    def kinds(self) -> dict[str, list[Tensor]]:
        """The live tensors by kind."""
        parameters = list(self.model.parameters())
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer state": [value for value in state if isinstance(value, Tensor)],
        }


@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.question("Where does the memory of a training step go?")
@pytest.mark.cases(cases.STEP_MEMORY)
def test_where_memory_goes(
    implementation: Implementation, case: TrainingStepCase, device: str, measure: Measure
) -> None:
    expected = activations(SIZES[case.model], case.batch, case.context, case.dtype)
    row = measure(LabelledStep, implementation, case, work=work(case), slack=1.02, activations=expected)
    if device == "cpu":
        for kept in row["memory"]["activations"]:
            assert kept["bytes"] == pytest.approx(kept["formula"], rel=0.02), f"{kept['module']} {kept['operator']}"

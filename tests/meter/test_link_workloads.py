"""Halves of a step that are timed on a link: computation sends nothing, and communication what the step sends."""

from typing import Any

import pytest

from correctness.support.communication import recorded
from impl.data_parallel.link_workload import DataParallelOnLink
from impl.fsdp.cases import FSDPCase
from impl.fsdp.link_workload import FSDPOnLink
from impl.tensor_parallel.cases import TensorParallelCase
from impl.tensor_parallel.link_workload import TensorParallelOnLink
from impl.training_step.cases import TrainingStepCase
from shardmark.api import resolve
from shardmark.plugin import WorldsBySize

HALVES = "compute_step", "communication_step"
STEPS: dict[str, tuple[type[Any], Any, str]] = {
    "data_parallel": (DataParallelOnLink, TrainingStepCase("tiny", batch=2, context=32), "bucketed"),
    "fsdp": (FSDPOnLink, FSDPCase("tiny", batch=2, context=32), "sharded"),
    "tensor_parallel": (TensorParallelOnLink, TensorParallelCase("tiny", batch=2, context=32, mesh="tp=2"), "sequence"),
}
SMALL = 0.05
"""Share of a tiny step's bytes that the halves may leave out: the loss and norms send as much for any width."""


def sent_on_rank(of: str) -> dict[str, int]:
    """Bytes that a step sends, and each of its halves, in the second call: the first makes what it needs."""
    workload, case, name = STEPS[of]
    made, found = workload(resolve(of, name), case, "cpu"), {}
    for method in ("step", *(each for each in HALVES if hasattr(made, each))):
        for _ in range(2):
            made.prepare()
            with recorded() as started:
                getattr(made, method)(lambda part: None)
        found[method] = sum(each.sent for each in started)
    return found


@pytest.mark.parametrize("of", STEPS)
def test_computation_sends_nothing_and_communication_what_the_step_sends(of: str, worlds: WorldsBySize) -> None:
    for found in worlds(2).run(sent_on_rank, of):
        assert found["compute_step"] <= SMALL * found["step"]
        if "communication_step" in found:
            assert found["communication_step"] == pytest.approx(found["step"], rel=SMALL)

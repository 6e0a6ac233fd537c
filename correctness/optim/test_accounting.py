"""The closed forms of an optimizer step against the model's own parameters, and against the meter."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from impl.model import SIZES, Transformer
from impl.optim import accounting
from impl.optim.cases import CLIPPING, OptimizerCase
from impl.optim.workload import OptimizerStep
from shardmark.api import family
from shardmark.meter.memory import meter


@pytest.mark.parametrize("model", ["tiny", "mini"])
def test_shapes_are_the_models(model: str) -> None:
    with torch.device("meta"):
        expected = sorted(tuple(p.shape) for p in Transformer(SIZES[model], context_length=8).parameters())
    assert sorted(accounting.shapes(SIZES[model])) == expected


def _peaks() -> Iterator[Any]:
    """Every implementation, dtype and way to clip; each term once, the rest is left to the sweep."""
    for name in ("plain", "fused_triton", "torch_forloop", "torch_foreach", "torch_fused"):
        for dtype in ("float32", "float64", "bfloat16"):
            for clipping in CLIPPING:
                every_time = (dtype, clipping) in {("float32", "none"), ("bfloat16", "in_step")}
                if name == "fused_triton":
                    every_time = (dtype, clipping) == ("bfloat16", "in_step")
                if name == "torch_fused":
                    every_time |= (dtype, clipping) == ("float32", "before_step")
                yield pytest.param(name, dtype, clipping, marks=[] if every_time else [pytest.mark.sweep])


@pytest.mark.parametrize(("name", "dtype", "clipping"), list(_peaks()))
def test_step_peak_is_exact_to_the_byte(name: str, dtype: str, clipping: str) -> None:
    implementation = family("optimizer").implementations[name]
    if reason := implementation.unavailable_reason("cpu"):
        pytest.skip(reason)
    case = OptimizerCase("tiny", dtype, master_weights=dtype == "bfloat16", clipping=clipping)
    with meter("cpu") as memory:
        step = OptimizerStep(implementation, case, "cpu")
        for _ in range(2):
            step.step(lambda part: None)
        memory.mark("before_step")
        memory.reset_peak()
        step.step(lambda part: None)
    assert implementation.memory is not None
    assert memory.tensors == implementation.memory(case)


def test_28_bytes_a_parameter_and_4_for_clipping() -> None:
    case = OptimizerCase("tiny")
    assert accounting.bytes_per_parameter(case) == 28
    assert accounting.bytes_per_parameter(replace(case, clipping="in_step")) == 32
    assert accounting.bytes_per_parameter(replace(case, dtype="bfloat16")) == 14
    master = replace(case, dtype="bfloat16", master_weights=True)
    assert accounting.bytes_per_parameter(master) == 28
    assert accounting.bytes_per_parameter(replace(master, clipping="in_step")) == 30
    assert accounting.work(case).bytes_moved == 28 * SIZES["tiny"].parameters

"""Arguments that layers refuse: ValueError for any implementation; ours in one line that says what is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from correctness.support.contracts import Note, assert_refused
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("layers"), pytest.mark.compiled_every_time]


def _skip_if_lacking(implementation: Implementation, operation: str) -> None:
    if not hasattr(implementation.target, operation):
        pytest.skip(f"it has no {operation}")


EPS: dict[str, Any] = {"eps": 1e-5}
MISMATCHED: dict[str, tuple[str, list[tuple[int, ...]], str]] = {  # shapes, and the pattern of our message
    "weight": ("rms_norm", [(4, 8), (9,)], r"x \(4, 8\), weight \(9,\)"),
    "weight_of_one": ("rms_norm", [(4, 8), (1,)], r"weight \(1,\)"),
    "a_weight_a_row": ("rms_norm", [(4, 8), (4, 8)], r"weight \(4, 8\)"),
    "no_column": ("rms_norm", [(4, 0), (0,)], r"x \(4, 0\)"),
    "residual": ("add_rms_norm", [(4, 8), (3, 8), (8,)], r"residual \(3, 8\)"),
    "residual_of_one_row": ("add_rms_norm", [(4, 8), (1, 8), (8,)], r"residual \(1, 8\)"),
    "up": ("swiglu", [(4, 8), (4, 9)], r"gate \(4, 8\), up \(4, 9\)"),
    "up_of_one_row": ("swiglu", [(4, 8), (8,)], r"up \(8,\)"),
    "heads_missing": ("rotary", [(2, 4, 8), (2, 4, 8), (4, 4), (4, 4)], r"q \(2, 4, 8\)"),
    "odd_head_dim": ("rotary", [(2, 3, 4, 7), (2, 3, 4, 7), (4, 3), (4, 3)], r"q \(2, 3, 4, 7\)"),
    "fewer_keys": ("rotary", [(2, 3, 4, 8), (2, 3, 3, 8), (4, 4), (4, 4)], r"k \(2, 3, 3, 8\)"),
    "longer_tables": ("rotary", [(2, 3, 4, 8), (2, 3, 4, 8), (5, 4), (5, 4)], r"cos \(5, 4\)"),
    "whole_tables": ("rotary", [(2, 3, 4, 8), (2, 3, 4, 8), (4, 8), (4, 8)], r"cos \(4, 8\)"),
}


@pytest.mark.should("shapes that do not go together are a ValueError")
@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_refused(
    implementation: Implementation, how: str, device: str, record_property: Note
) -> None:
    operation, shapes, wording = MISMATCHED[how]
    _skip_if_lacking(implementation, operation)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    call = partial(getattr(implementation.watched, operation), *tensors, **(EPS if "norm" in operation else {}))
    assert_refused(implementation, f"{operation} of {shapes}", call, wording, record_property)


F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES: dict[str, tuple[str, list[torch.dtype], str]] = {
    "residual_of_half": ("add_rms_norm", [F32, F16, F32], "got torch.float32, torch.float16, torch.float32"),
    "weight_of_half": ("rms_norm", [F32, F16], "got torch.float32, torch.float16"),
    "weight_of_the_other_half": ("rms_norm", [BF16, F16], "got torch.bfloat16, torch.float16"),
    "weight_of_float32_beside_float64": ("rms_norm", [F64, F32], "got torch.float64, torch.float32"),
    "up_of_float32": ("swiglu", [F16, F32], "got torch.float16, torch.float32"),
    "whole_numbers": ("swiglu", [torch.int32, torch.int32], "got torch.int32, torch.int32"),
    "k_of_float32": ("rotary", [BF16, F32, BF16, BF16], "got torch.bfloat16, torch.float32"),
}
SHAPES = {"rms_norm": [(4, 8), (8,)], "add_rms_norm": [(4, 8), (4, 8), (8,)], "swiglu": [(4, 8), (4, 8)]}
SHAPES |= {"rotary": [(2, 3, 4, 8), (2, 3, 4, 8), (4, 4), (4, 4)]}


@pytest.mark.should("dtypes and devices that do not go together are a ValueError")
@pytest.mark.parametrize("how", [*DTYPES, "another_device"])
def test_dtypes_and_devices_that_do_not_go_together_are_refused(
    implementation: Implementation, how: str, device: str, record_property: Note
) -> None:
    operation, dtypes, wording = DTYPES.get(how, ("rms_norm", [F32, F32], "on one device, got .*meta"))
    _skip_if_lacking(implementation, operation)
    tensors = [torch.ones(x, dtype=dtype, device=device) for x, dtype in zip(SHAPES[operation], dtypes, strict=True)]
    if how == "another_device":
        tensors[1] = tensors[1].to("meta")
    call = partial(getattr(implementation.watched, operation), *tensors, **(EPS if "norm" in operation else {}))
    assert_refused(implementation, f"{operation} of {dtypes}", call, wording, record_property)

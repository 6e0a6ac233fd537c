"""Inputs that attention refuses: ValueError for any implementation; ours in one line that says what is wrong."""

from functools import partial

import pytest
import torch
from torch import Tensor

from correctness.attention.accuracy import random_inputs
from correctness.support.contracts import Note, assert_refused, is_ours, may_raise
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.compiled_every_time]

MISMATCHED = {  # shapes of q, k, v, and the pattern of our message
    "head_dim": ((2, 4, 8), (2, 5, 16), (2, 5, 16), r"q \(2, 4, 8\), k \(2, 5, 16\)"),
    "leading_dims": ((2, 4, 8), (3, 4, 8), (3, 4, 8), "same leading dims"),
    "more_key_heads": ((1, 4, 8), (2, 4, 8), (2, 4, 8), "same leading dims"),
    "no_whole_groups": ((2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), "integer factor"),
    "batch": ((2, 3, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8), "same leading dims"),
    "number_of_dims": ((2, 4, 8), (4, 8), (4, 8), r"k \(4, 8\)"),
    "k_and_v": ((2, 4, 8), (2, 5, 8), (2, 6, 8), r"v \(2, 6, 8\)"),
    "no_seq": ((8,), (8,), (8,), r"q \(8,\)"),
}


@pytest.mark.should("shapes that do not go together are a ValueError")
@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_refused(
    implementation: Implementation, how: str, device: str, record_property: Note
) -> None:
    *shapes, wording = MISMATCHED[how]
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    what = "q {}, k {}, v {}".format(*shapes)
    assert_refused(implementation, what, partial(implementation.watched, *inputs), wording, record_property)


@pytest.mark.should("dtypes that do not go together are a ValueError")
def test_dtypes_that_do_not_go_together_are_refused(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    q, k, v, _ = random_inputs((2, 1, 16), (2, 5, 16), torch.float32, device)
    call = partial(implementation.watched, q, k.double(), v)
    wording = "one floating dtype .*got torch.float32, torch.float64, torch.float32"
    assert_refused(implementation, "k of float64 beside q and v of float32", call, wording, record_property)


@pytest.mark.should("dtypes that are not floating are a ValueError")
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_attention_is_not_defined_for_are_refused(
    implementation: Implementation, dtype: torch.dtype, device: str, record_property: Note
) -> None:
    """Any implementation refuses integers, which would round the output; ours refuse all but the four float dtypes."""
    inputs = [x.to(dtype) for x in random_inputs((2, 1, 16), (2, 5, 16), torch.float32, device)[:3]]
    if is_ours(implementation):
        call = partial(implementation.watched, *inputs)
        assert_refused(implementation, str(dtype), call, "one floating dtype", record_property)
        return
    try:
        found = implementation.watched(*inputs)
    except Exception as error:
        if not isinstance(error, ValueError):
            record_property("note", f"for {dtype} it raises {type(error).__name__}, and not ValueError")
        return
    assert isinstance(found, Tensor), f"for {dtype} it returned {found!r}"
    assert dtype != torch.int32, f"takes whole numbers, and returns {found.dtype}"
    record_property("note", f"takes {dtype}, of which the contract says nothing")


@pytest.mark.should("attention without keys is a ValueError")
@pytest.mark.parametrize("shapes", [((2, 3, 8), (2, 0, 8)), ((2, 3, 0), (2, 3, 0))], ids=["no_keys", "no_columns"])
def test_nothing_to_attend_to_is_refused(
    implementation: Implementation, shapes: tuple[tuple[int, ...], ...], device: str, record_property: Note
) -> None:
    q, k, v = (torch.randn(shape, device=device) for shape in (shapes[0], shapes[1], shapes[1]))
    call = partial(implementation.watched, q, k, v)
    if not is_ours(implementation):
        pytest.skip("the contract asks nobody else for a head_dim, or for keys, of which there are none")
    assert_refused(implementation, f"q {shapes[0]}, k {shapes[1]}", call, "attention over nothing", record_property)


NOTHING_ASKED = {  # shapes of q and of k
    "no_sequences": ((0, 5, 8), (0, 5, 8)),
    "no_sequences_of_heads": ((0, 2, 5, 8), (0, 1, 5, 8)),
    "no_heads": ((2, 0, 5, 8), (2, 0, 5, 8)),
    "no_queries": ((2, 0, 8), (2, 5, 8)),
    "no_queries_and_no_keys": ((2, 3, 0, 8), (2, 3, 0, 8)),
}


@pytest.mark.should("without queries the output is empty, or an error")
@pytest.mark.parametrize("how", NOTHING_ASKED)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_nothing_asked_is_an_empty_answer(
    implementation: Implementation, how: str, is_causal: bool, device: str, record_property: Note
) -> None:
    """Empty batches occur, for example a rank's share of a small batch; torch's modules accept them."""
    q, k = (torch.randn(shape, device=device, requires_grad=True) for shape in NOTHING_ASKED[how])
    v = torch.randn_like(k, requires_grad=True)
    gradients: tuple[Tensor, ...] = ()
    with may_raise(implementation, f"attention of {how.replace('_', ' ')}", record_property):
        out = implementation.watched(q, k, v, is_causal=is_causal)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not gradients or out.shape == q.shape, f"the output of q {tuple(q.shape)} is {tuple(out.shape)}"
    for name, x, gradient in zip("qkv", (q, k, v), gradients, strict=False):
        assert gradient.shape == x.shape and not gradient.any(), f"the gradient of {name} is {gradient}, expected zeros"


@pytest.mark.should("tensors of several devices are a ValueError")
def test_devices_that_do_not_go_together_are_refused(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    q, k, v, _ = random_inputs((2, 1, 16), (2, 5, 16), torch.float32, device)
    wording = rf"attention takes q, k, v on one device, got {device}\S*, meta, {device}"
    call = partial(implementation.watched, q, k.to("meta"), v)
    assert_refused(implementation, "k on another device", call, wording, record_property)

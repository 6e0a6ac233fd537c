"""Steps of AdamW against the reference: each part of the formula, then parameters of any dtype, number and size."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.optim.mistakes import mistakes
from correctness.optim.training import (
    ARGUMENTS,
    assert_as_accurate_as_plain,
    assert_near,
    counts_beside_launches,
    gradients,
    interpreted,
    leaves,
    run,
    tensors,
    train,
)
from correctness.support.contracts import Note, is_ours
from correctness.support.default_dtype import default_dtype
from impl.optim import AdamW
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]


def test_the_first_step_has_the_length_of_lr(implementation: Implementation, device: str) -> None:
    """With bias corrections, the first step's moments are the gradient and its square: the update is about lr."""
    start = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64, device=device)
    grad = torch.tensor([1e-3, 5.0, -200.0], dtype=torch.float64, device=device)
    (found,) = train(implementation.watched, [start], [[grad]], lr=0.1, eps=0.0, weight_decay=0.0)
    assert_near(start - found, 0.1 * grad.sign(), 1e-10, "the first step")


def test_corrections_of_betas_near_1_in_float32(
    implementation: Implementation, device: str, request: pytest.FixtureRequest
) -> None:
    """1 - beta**step cancels: in float32 it loses five of seven digits in the first step with beta2 = 0.99999."""
    if device == "cuda" and implementation.name == "torch_fused":
        why = "its second moments are too small, 1.4e-3 for beta2 = 0.99999: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    start, grad = (x.to(device) for x in (torch.zeros(3), torch.tensor([1e-3, 5.0, -200.0])))
    options: dict[str, Any] = {"lr": 1.0, "eps": 0.0, "weight_decay": 0.0, "betas": (0.999, 0.99999)}
    (found,) = train(implementation.watched, [start], [[grad]], **options)
    assert_near(found, -grad.sign(), 16 * torch.finfo(torch.float32).eps, "the first step")


def test_weight_decay_is_apart_from_the_gradient(implementation: Implementation, device: str) -> None:
    """Weight decay subtracts lr * weight_decay * parameter and does not enter the moments."""
    start = tensors(device)
    (grads,) = gradients(start, 1)
    for lr in (0.1, 0.01):
        plain, decayed = (train(implementation.watched, start, [grads], lr=lr, weight_decay=x) for x in (0.0, 0.5))
        for i, x in enumerate(start):
            known = partial(_mistaken_decays, plain[i], x, grads[i], {"lr": lr, "weight_decay": 0.5})
            assert_near(plain[i] - decayed[i], lr * 0.5 * x, 1e-10, f"decay of parameter {i} at lr {lr}", known)


def _mistaken_decays(
    plain: Tensor, start: Tensor, grad: Tensor, options: dict[str, Any]
) -> dict[str, Callable[[], Tensor]]:
    """The decays that mistakes have beside `plain`, the parameter after a step without decay."""
    wrong = mistakes(start, [grad], options)
    return {name: partial(lambda result: plain - result(), result) for name, result in wrong.items()}


def test_eps_is_added_to_the_root(implementation: Implementation, device: str) -> None:
    start, grad = (torch.full((3,), x, dtype=torch.float64, device=device) for x in (1.0, 1e-3))
    options: dict[str, Any] = {"lr": 0.1, "eps": 3e-3, "weight_decay": 0.0}
    (found,) = train(implementation.watched, [start], [[grad]], **options)
    expected, known = start - 0.1 * grad / (grad + 3e-3), partial(mistakes, start, [grad], options)
    assert_near(found, expected, 1e-10, "after a step of lr * g / (|g| + eps) the parameter", known)


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_leads_where_adamw_does(implementation: Implementation, arguments: dict[str, Any], device: str) -> None:
    start = tensors(device)
    assert_as_accurate_as_plain(implementation.watched, start, gradients(start, 5), **arguments)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 20), (torch.bfloat16, 2)], ids=str)
def test_is_as_accurate_in_its_dtype(
    implementation: Implementation, dtype: torch.dtype, steps: int, device: str
) -> None:
    start = tensors(device, dtype, ((3, 5), (130,)))
    grads = gradients(start, steps)
    assert_as_accurate_as_plain(implementation.watched, start, grads, **ARGUMENTS["language_model"])


def test_large_gradients_in_float16(implementation: Implementation, device: str, record_property: Note) -> None:
    """Their squares overflow float16, but (1 - beta2) times a square does not; ours and PyTorch's compute that."""
    start = tensors(device, torch.float16, ((3, 5), (130,)))
    grads = [[x.sign() * (200 + 100 * x.abs()).clamp(max=500) for x in step] for step in gradients(start, 2)]
    try:
        assert_as_accurate_as_plain(implementation.watched, start, grads, lr=1e-2)
    except AssertionError:
        if is_ours(implementation):
            raise
        record_property("note", "gradients of some hundreds in float16 overflow in it: give it master weights")


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=lambda dtype: f"{dtype}_by_default")
def test_each_of_300_steps(implementation: Implementation, default: torch.dtype, device: str) -> None:
    """More steps than a count in bfloat16 or 8 bits can hold; by then bias corrections are near 1."""
    start = tensors(device, shapes=((3,),))
    grads = gradients(start, 30 if interpreted(implementation, device) else 300)
    with default_dtype(default):
        assert_as_accurate_as_plain(implementation.watched, start, grads, lr=1e-2)


@pytest.mark.parametrize("steps", [pytest.param(3_000, marks=pytest.mark.sweep), 70_000])
def test_late_steps(implementation: Implementation, steps: int, device: str) -> None:
    """Training goes on from a state of torch's AdamW, where 1 - beta2**step still matters."""
    start = tensors(device, shapes=((5,), (2, 3)))
    grads = gradients(start, 3)
    options = {"lr": 1e-2, "betas": (0.9, 0.99999)}
    theirs = torch.optim.AdamW(leaves(start), **options)
    run(theirs, grads[:1])
    for state in theirs.state.values():
        state["step"].fill_(steps)
    found = []
    for target in (implementation.watched, AdamW):
        optimizer = target(leaves(start), **options)
        try:
            optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
            found.append(run(optimizer, grads[1:]))
        except Exception as error:
            if target is AdamW:
                raise
            pytest.skip(f"{implementation} does not go on from the state of torch's AdamW: {error}")
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        assert_near(x.detach(), y.detach(), 1e-10, f"parameter {i} after step {steps} + 2")


def test_a_large_parameter(implementation: Implementation, device: str) -> None:
    """Above 1 MiB, with a partial last chunk for any chunk size."""
    size = 33_001 if interpreted(implementation, device) else 300_001
    start = tensors(device, torch.float32, ((size,), (3, 5)))
    assert_as_accurate_as_plain(implementation.watched, start, gradients(start, 2), **ARGUMENTS["language_model"])


def test_no_parameter_is_left_of_any_number(implementation: Implementation, device: str) -> None:
    for count in counts_beside_launches(implementation, device):
        start = tensors(device, shapes=[(1,)] * count)
        (grads,) = gradients(start, 1)
        found = train(implementation.watched, start, [grads], lr=0.1, eps=0.0, weight_decay=0.0)
        step, expected = torch.cat(start) - torch.cat(found), 0.1 * torch.cat(grads).sign()
        assert_near(step, expected, 1e-10, f"of {count} parameters of one element, the first step")


def test_dtypes_may_be_mixed(implementation: Implementation, device: str) -> None:
    start = [
        x for dtype in (torch.float32, torch.float64, torch.bfloat16) for x in tensors(device, dtype, ((40,), (3,)))
    ]
    grads = gradients(start, 2)
    assert_as_accurate_as_plain(implementation.watched, start, grads, **ARGUMENTS["language_model"])


def test_it_seeds_no_random_numbers_of_the_callers(implementation: Implementation, device: str) -> None:
    """It may draw some, to round parameters at random."""
    start = [x for dtype in (torch.float32, torch.bfloat16) for x in tensors(device, dtype, ((40,), (3,)))]
    grads = gradients(start, 2)
    states = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            train(implementation.watched, start, grads)
            states.append(torch.get_rng_state())
    assert not torch.equal(*states), "a step seeds the process's random numbers: other seeds end in one state"

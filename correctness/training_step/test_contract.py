"""Contract of the training step, one property per test: loss, gradients and the optimizer's step."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.histories import hold
from correctness.training_step.models import moody_model
from correctness.training_step.stepping import (
    BATCH,
    SIZE,
    assert_gradients,
    assert_loss,
    batch,
    exact,
    gradients,
    relative_error,
    setting,
    taken,
    values,
)
from impl.model.mlp import MLPLanguageModel
from impl.optim import AdamW
from impl.precision import PRECISIONS
from shardmark.api import FAMILIES, Implementation

pytestmark = pytest.mark.family("training_step")


@pytest.mark.parametrize("times", [1, 30], ids=["small", "large"])
def test_the_loss_and_its_gradients_are_those_of_the_mean_cross_entropy(
    implementation: Implementation, times: int, device: str
) -> None:
    of = setting(implementation, device)
    with torch.no_grad():
        of.model.get_parameter("output.weight").mul_(times)
    loss, expected = exact(of.model, of.tokens, of.targets)
    assert_loss(of.step(of.tokens, of.targets), loss)
    assert_gradients(gradients(of.model), expected)


@pytest.mark.parametrize("rows", [4, 64, 67])
def test_the_mean_is_over_all_targets_of_a_large_batch(implementation: Implementation, rows: int, device: str) -> None:
    """Rows have different numbers of targets, and the model mixes rows: the average of micro-batches' losses is another
    loss."""
    of = setting(implementation, device, model=moody_model())
    tokens, targets = batch(device, (rows, 8))
    counted = 8 * torch.arange(rows, device=device)[:, None] >= rows * torch.arange(8, device=device)
    targets = targets.masked_fill(~counted, -100)
    loss, expected = exact(of.model, tokens, targets)
    assert_loss(of.step(tokens, targets), loss)
    assert_gradients(gradients(of.model), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_is_a_float32_scalar_and_detached_from_a_full_step(
    implementation: Implementation, precision: str, device: str
) -> None:
    dtype = PRECISIONS[precision].parameter
    model = MLPLanguageModel(SIZE).to(device, dtype)
    master = PRECISIONS[precision].master is not None
    optimizer = AdamW(model.parameters(), lr=0.0, master_weights=master)
    step = implementation.watched(model, optimizer, precision=PRECISIONS[precision])
    for what, loss in {"forward": step.forward(*batch(device)), "the full step": step(*batch(device))}.items():
        assert loss.shape == (), f"{what} returned a loss of shape {tuple(loss.shape)}"
        assert loss.dtype == torch.float32, f"{what} returned a loss of {loss.dtype}, expected torch.float32"
        assert loss.requires_grad == (what == "forward"), f"the loss of {what} has requires_grad={loss.requires_grad}"


def test_ignored_targets_count_in_no_mean(implementation: Implementation, device: str) -> None:
    """One sequence has no target that counts, another a few."""
    of = setting(implementation, device)
    of.targets[0] = -100
    of.targets[1, 3:] = -100
    loss, expected = exact(of.model, of.tokens, of.targets)
    assert_loss(of.step(of.tokens, of.targets), loss, "the loss, of targets of which some are -100,")
    assert_gradients(gradients(of.model), expected)


@pytest.mark.should("where every target is ignored nothing is learnt")
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_where_all_targets_are_ignored_the_loss_is_nan_and_nothing_is_learnt(
    implementation: Implementation, precision: str, device: str
) -> None:
    of = setting(implementation, device, precision, lr=1.0)
    before = values(of.model)
    loss = of.step(of.tokens, torch.full_like(of.targets, -100))
    assert loss.isnan(), f"where all targets are -100 the loss is {loss.item()}, expected NaN"
    for name, p in of.model.named_parameters():
        assert p.grad is None or not p.grad.any(), f"where all targets are -100, {name} has a gradient that is not zero"
        assert torch.equal(p, before[name]), f"where all targets are -100, {name} has changed"


@pytest.mark.examples(20, 100, 1000)
def test_any_targets_and_any_scale_of_the_logits(implementation: Implementation, examples: int, device: str) -> None:
    of = setting(implementation, device)  # one for all examples, as each new step may compile
    ids = st.lists(
        st.sampled_from([-100, 0, 1, SIZE.vocab - 1]), min_size=of.targets.numel(), max_size=of.targets.numel()
    )

    def holds(drawn: tuple[float, list[int]]) -> None:
        std, ids = drawn
        nn.init.normal_(of.model.get_parameter("output.weight"), std=std)
        of.optimizer.zero_grad()
        targets = torch.tensor(ids, device=device).view(BATCH)
        loss, expected = exact(of.model, of.tokens, targets)
        assert_loss(of.step(of.tokens, targets), loss)
        error = relative_error(gradients(of.model), expected)
        assert error < 1e-4, f"the gradients' relative error is {error:.2g}, allowed 1e-4"

    logits = st.sampled_from([1e-3, 0.1, 10.0])
    hold(st.tuples(logits, ids.filter(lambda ids: max(ids) >= 0)), holds, examples)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_products_are_in_the_precisions_dtype(implementation: Implementation, precision: str, device: str) -> None:
    """The error against float64 is like eager's in that dtype: no larger and, in half precision, no smaller."""
    model, inputs, lr = MLPLanguageModel(SIZE).to(device), batch(device), 100.0
    _, wanted = exact(model, *inputs)
    errors = []
    for each in (implementation, FAMILIES["training_step"].implementations["eager"]):
        of = setting(each, device, precision, copy.deepcopy(model), lr=lr)
        of.step(*inputs)
        errors.append(relative_error(taken(values(model), values(of.model), lr), wanted))
    found, eager = errors
    of_dtype = f"products in {precision} have a relative error of {eager:.2g}"
    assert found < 2.8 * eager, f"the gradients' relative error is {found:.2g}, where {of_dtype}"  # 8 between halves
    assert precision == "float32" or found > eager / 2.8, (
        f"the gradients' relative error is {found:.2g}, so that its products are not in {precision}: {of_dtype}"
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_each_step_uses_the_last_ones_parameters(implementation: Implementation, precision: str, device: str) -> None:
    """Not a copy that was cast earlier: after steps that halve the loss, forward's loss is half too."""
    of = setting(implementation, device, precision, lr=1.0)
    first = expected = exact(of.model, of.tokens, of.targets)[0]
    for _ in range(40):
        if expected < first / 2:
            break
        of.optimizer.zero_grad()
        of.step(of.tokens, of.targets)
        expected, _ = exact(of.model, of.tokens, of.targets)
    assert expected < first / 2, f"40 steps took the loss from {first:.4g} to {expected:.4g}, not to half of it"
    found = of.step.forward(of.tokens, of.targets).item()
    assert abs(found - expected) < 0.1 * expected, f"the loss is {found:.4g}, of the parameters it is {expected:.4g}"


@pytest.mark.parametrize("precision", [name for name, of in PRECISIONS.items() if of.compute != torch.float16])
def test_a_gradient_that_is_not_finite_is_stepped_on(
    implementation: Implementation, precision: str, device: str
) -> None:
    """But in float16, where the loss scale may be what made it so."""
    policy = PRECISIONS[precision]
    model, inputs = MLPLanguageModel(SIZE).to(device, policy.parameter), batch(device)
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.0, master_weights=policy.master is not None)
    step = implementation.watched(model, optimizer, precision=policy)
    step.backward(step.forward(*inputs))
    with torch.no_grad():
        model.output.weight.grad[0, 0] = torch.inf
    before, given = values(model), gradients(model)
    step.update()
    for name, value in values(model).items():
        moved = value != before[name]
        right = torch.equal(value.isnan(), given[name].isinf()) and bool(moved[given[name] != 0].all())
        assert right, f"of one gradient that is infinite: {name} is not moved by its own"


def test_large_gradients_are_not_clipped(implementation: Implementation, device: str) -> None:
    model = MLPLanguageModel(SIZE).to(device)
    with torch.no_grad():
        model.output.weight.mul_(30)
    of = setting(implementation, device, model=model, lr=1.0)
    before = values(of.model)
    _, expected = exact(of.model, of.tokens, of.targets)
    of.step(of.tokens, of.targets)
    assert_gradients(taken(before, values(of.model), 1.0), expected, 1e-3, "step")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "of_all_steps",
    [False, pytest.param(True, marks=pytest.mark.should("the caller's autocast around all steps changes nothing"))],
    ids=["forward", "all_steps"],
)
def test_the_callers_autocast_changes_nothing(
    implementation: Implementation, precision: str, of_all_steps: bool, device: str
) -> None:
    """It is on in each forward, or around all steps: it then casts in backward too, and keeps casts of old weights."""
    model, inputs, losses = MLPLanguageModel(SIZE).to(device), batch(device), []
    for around in (nullcontext(), torch.autocast(device, torch.bfloat16)):
        of = setting(implementation, device, precision, copy.deepcopy(model), lr=1.0)
        with around if of_all_steps else nullcontext():
            losses.append([_step(of.step, inputs, nullcontext() if of_all_steps else around) for _ in range(3)])
    close = 1e-5 if precision == "float32" else 1e-2  # a rounding of bfloat16; older weights show as a loss that stays
    for number, (alone, found) in enumerate(zip(*losses, strict=True), 1):
        assert found.item() == pytest.approx(alone.item(), rel=close), (
            f"the loss of step {number} under the caller's autocast is {found.item():.7g}, alone {alone.item():.7g}"
        )


def _step(step: Any, inputs: Any, around_forward: AbstractContextManager[Any]) -> Tensor:
    with around_forward:
        loss: Tensor = step.forward(*inputs)
    step.backward(loss)
    step.update()
    return loss.detach()

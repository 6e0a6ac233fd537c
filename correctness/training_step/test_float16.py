"""A training step in float16: the loss is scaled, gradients are unscaled, and a step that overflows is skipped."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.training_step.stepping import (
    OPTIMIZERS,
    SIZE,
    assert_gradients,
    exact,
    relative_error,
    setting,
    taken,
    values,
)
from impl.model.mlp import MLPLanguageModel
from shardmark.api import Implementation

pytestmark = pytest.mark.family("training_step")

CLOSE = 0.02
"""Allowed relative error of float16 gradients and losses: many roundings of at most 0.001 each."""


def assert_loss(found: Tensor, expected: float, when: str) -> None:
    off = abs(found.item() / expected - 1)
    assert off < CLOSE, f"the loss of {when} is {found.item():.6g}, {expected:.6g} is right"


def test_float16_takes_the_step_of_unscaled_gradients(implementation: Implementation, device: str) -> None:
    of = setting(implementation, device, "float16", lr=1.0)
    before, (_, expected) = values(of.model), exact(of.model, of.tokens, of.targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first scale may be too large for a model; for this one it is not
        of.step(of.tokens, of.targets)
    assert_gradients(taken(before, values(of.model), 1.0), expected, CLOSE, "float16 step")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (torch.inf, "output.weight"),
        pytest.param(-torch.inf, "embedding.weight", marks=pytest.mark.sweep),
        (torch.nan, "blocks.0.w1.bias"),
    ],
    ids=["inf", "minus_inf", "nan"],
)
def test_a_float16_step_that_overflows_is_skipped_with_a_warning(
    implementation: Implementation, bad: float, name: str, optimizer: str, device: str
) -> None:
    """It leaves nothing in the optimizer: the next step is as if it were the first."""
    of = setting(implementation, device, "float16", optimizer=optimizer, lr=1.0, momentum=0.9)
    before, (right, expected) = values(of.model), exact(of.model, of.tokens, of.targets)

    def overflow(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[-1] = bad
        return grad

    hook = of.model.get_parameter(name).register_hook(overflow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = of.step(of.tokens, of.targets)
    assert_loss(loss, right, f"a step with gradients of {bad}")
    for changed, value in values(of.model).items():
        assert torch.equal(value, before[changed]), f"gradients of {bad} have changed {changed}: it is not skipped"
    kinds = [each.category for each in caught]
    assert any(issubclass(kind, RuntimeWarning) for kind in kinds), (
        f"gradients of {bad} gave {[kind.__name__ for kind in kinds] or 'no warning'}, expected RuntimeWarning"
    )
    hook.remove()
    of.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        loss = of.step(of.tokens, of.targets)
    assert_loss(loss, right, "the step after the skipped one")
    assert_gradients(taken(before, values(of.model), 1.0), expected, CLOSE, "step after the skipped one")


@pytest.mark.parametrize("bad", [None, torch.inf], ids=["finite", "overflow"])
def test_a_group_that_the_optimizer_gets_later_is_unscaled_too(
    implementation: Implementation, bad: float | None, device: str
) -> None:
    """As layers are thawed one after another; an overflow in that group alone skips the step."""
    model = MLPLanguageModel(SIZE)
    late = list(model.output.parameters())
    for p in late:
        p.requires_grad_(False)
    of = setting(implementation, device, "float16", model, lr=1.0)
    for p in late:
        p.requires_grad_(True)
    of.optimizer.add_param_group({"params": late})
    before, (_, expected) = values(of.model), exact(of.model, of.tokens, of.targets)
    if bad is not None:
        late[0].register_hook(lambda grad: torch.full_like(grad, bad))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if bad else "error")
        of.step(of.tokens, of.targets)
    if bad is None:
        assert_gradients(taken(before, values(of.model), 1.0), expected, CLOSE, "float16 step")
    else:
        changed = [name for name, value in values(of.model).items() if not torch.equal(value, before[name])]
        assert not changed, f"gradients of a later group are {bad}, and {changed[0]} has changed: it is not skipped"


@pytest.mark.parametrize("bad", [None, torch.inf], ids=["finite", "overflow"])
def test_a_sparse_gradient_is_unscaled_too_or_an_error(
    implementation: Implementation, bad: float | None, device: str
) -> None:
    """An embedding's; an overflow in it alone skips the step."""
    of = setting(implementation, device, "float16", lr=1.0)
    before, (_, expected) = values(of.model), exact(of.model, of.tokens, of.targets)
    embedding: Any = of.model.get_submodule("embedding")
    embedding.sparse = True
    if bad is not None:
        embedding.weight.register_hook(lambda grad: grad * bad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of.step(of.tokens, of.targets)
    except Exception:  # as `torch.compile` where it compiles backward
        return
    if bad is None:
        assert_gradients(taken(before, values(of.model), 1.0), expected, CLOSE, "float16 step")
    else:
        changed = [name for name, value in values(of.model).items() if not torch.equal(value, before[name])]
        assert not changed, f"a sparse gradient is {bad}, and {changed[0]} has changed: the step is not skipped"


class Steep(MLPLanguageModel):
    """A model whose gradients are `slope` times those of its logits' values."""

    def __init__(self, slope: float) -> None:
        super().__init__(SIZE)
        self.slope = slope

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide + (self.slope - 1) * (wide - wide.detach())


@pytest.mark.parametrize(("most", "slope"), [(64, 1.0), (2**-5, 1.0), (2**-20, 2.0**15)])
def test_the_loss_scale_falls_until_gradients_fit(
    implementation: Implementation, most: float, slope: float, device: str
) -> None:
    """`most` is the largest scale at which gradients fit; below 1 for gradients larger than float16 can hold."""
    lr = 1 / slope
    of = setting(implementation, device, "float16", Steep(slope), lr=lr)
    before, (right, expected) = values(of.model), exact(of.model, of.tokens, of.targets)
    largest = most * 1.1 * expected["output.weight"].abs().max().item()
    weight = of.model.get_parameter("output.weight")
    weight.register_hook(lambda grad: torch.where(grad.abs() > largest, torch.inf, grad))
    steps = 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while steps and torch.equal(weight, before["output.weight"]):
            of.optimizer.zero_grad()
            assert_loss(of.step(of.tokens, of.targets), right, f"float16 step {41 - steps}")
            steps -= 1
    assert steps, f"gradients fit into float16 at a loss scale of {most:g} and below; 40 steps were skipped"
    assert_gradients(taken(before, values(of.model), lr), expected, CLOSE, "first step that fits")


class Faint(MLPLanguageModel):
    """A model whose logits, and so gradients, are below float16's smallest number."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2.0**-24


def test_gradients_too_small_for_float16_arrive(implementation: Implementation, device: str) -> None:
    lr = 1e8
    of = setting(implementation, device, "float16", Faint(SIZE), lr=lr)
    before, (_, expected) = values(of.model), exact(of.model, of.tokens, of.targets)
    of.step(of.tokens, of.targets)
    error = relative_error(taken(before, values(of.model), lr), expected)
    assert error < 0.5, (
        f"the step of gradients of 1e-9, which float16 has only where the loss is scaled, has a relative error of "
        f"{error:.2g}"
    )
